"""Nothing here is collected: these modules import packages that only `make test-strangers` installs."""

collect_ignore_glob = ["*.py"]
