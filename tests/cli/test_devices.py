import jax
import pytest

from cjax.cli import devices
from cjax.cli.devices import training_devices


def test_virtual_devices_where_there_is_no_accelerator():
    assert len(training_devices(None)) == len(training_devices("8")) == len(training_devices("cpu:8")) == 8


def test_accelerators_where_there_are(monkeypatch):
    class Card:
        platform = "gpu"

    cards = [Card() for _ in range(4)]
    monkeypatch.setattr(devices, "quiet_devices", lambda: cards)
    assert training_devices(None) == cards
    assert training_devices("2") == cards[:2]
    with pytest.raises(ValueError, match='4 are here; "cpu:5" makes virtual ones'):
        training_devices("5")
    assert training_devices("cpu:8") == jax.devices()


@pytest.mark.parametrize("text", ["eight", "0", "tpu:8", "cpu:", ":"])
def test_other_text_is_refused(text: str):
    with pytest.raises(ValueError, match=f"--devices {text}: write a number"):
        training_devices(text)


def test_absent_cards_are_for_planning():
    for text in ("h100:64", "h100-pcie:8/node=4"):
        with pytest.raises(ValueError, match=f"cjax plan --target {text} compiles for them"):
            training_devices(text)
