"""What stands behind the commands that train to a known number: options, devices, the run, and adapters."""
