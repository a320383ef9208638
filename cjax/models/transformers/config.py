"""config.json to the sizes of our models and back, as the tables say."""

import dataclasses
import re
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from cjax.models.transformers.tables import WeightTable, tables

_ABSENT = object()


def read(json: Mapping[str, Any], path: Path) -> tuple[WeightTable, list[Any]]:
    """The table of the model, and its sizes: several if its class alone doesn't say which parts there are.

    Raises:
        ValueError: a model that we don't have, or a kind of it; every reason is listed.
    """
    model_type = json.get("model_type")
    table = next((table for table in tables if table.model_type == model_type), None)
    if table is None:
        known = ", ".join(f"{table.kind.__name__} ({table.model_type})" for table in tables)
        raise ValueError(f"{path} is of another architecture, {model_type!r}; there are {known}")
    problems = []
    names = json.get("architectures") or list(table.architectures)[:1]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{path}: architectures is {names!r}; it should be a list of names")
    implied = next((table.architectures[name] for name in names if name in table.architectures), None)
    if implied is None:
        problems.append(f"architectures is {', '.join(names)}; one of {', '.join(table.architectures)} is needed")
    for key, allowed in table.required.items():
        value = _look_up(json, key)
        if value is not _ABSENT and value is not None and value not in allowed:
            problems.append(f"{key} is {value!r}; {' or '.join(map(repr, allowed))} is needed")
    if problems or implied is None:
        raise ValueError(
            f"{path} holds a kind of {table.kind.__name__} that is not implemented:\n  " + "\n  ".join(problems)
        )
    fields = dict(table.defaults)
    for field, keys in table.read.items():
        found = ((key, _look_up(json, key)) for key in keys)
        key, value = next(((k, v) for k, v in found if v is not _ABSENT and v is not None), ("", _ABSENT))
        if value is not _ABSENT:
            fields[field] = _value(table, key, value)
            if problem := _wrong_kind(table, field, fields[field]):
                problems.append(f"{key} is {value!r:.80}; {problem}")
    if problems:
        raise ValueError(f"{path} says of its {table.kind.__name__} what can't be:\n  " + "\n  ".join(problems))
    return table, [table.config(**{**fields, **more}) for more in implied]


def check_layers(table: WeightTable, config: Any, json: Mapping[str, Any], names: Collection[str], path: Path) -> None:
    """Raises ValueError if there are more layers than tensors: to build them would take for ever."""
    layers = [int(number) for name in names for number in re.findall(r"\.(\d+)\.", name)]
    for field, keys in table.read.items():
        if field.endswith("layers") and (number := getattr(config, field)) > max(len(names), 1):
            key = next((key for key in keys if _look_up(json, key) == number), keys[0])
            there = f"of layers 0 to {max(layers)}" if layers else "none of them of a layer"
            raise ValueError(
                f"config.json in {path} says {key}={number:,}, and its files hold {len(names)} tensors, {there}: "
                f"write {key}={max(layers, default=0) + 1} if these are the model's, or copy the folder again."
            )


def _wrong_kind(table: WeightTable, field: str, value: Any) -> str | None:
    """What is needed instead, if a value of config.json can't be that of our field."""
    hint = typing.get_type_hints(table.config)[field]
    kinds = typing.get_args(hint) or (hint,)
    if type(value) in kinds or (float in kinds and type(value) is int):
        return None
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", type(None): "null"}
    return f"{' or '.join(str(names.get(kind, kind)) for kind in kinds)} is needed"


def architecture(table: WeightTable, config: Any) -> str:
    """Which class of theirs a model is.

    Raises:
        ValueError: they have none that is like it.
    """
    for name, choices in table.architectures.items():
        if any(all(getattr(config, field) == value for field, value in implied.items()) for implied in choices):
            return name
    implied = {field: getattr(config, field) for choices in table.architectures.values() for field in choices[0]}
    said = ", ".join(f"{field}={value!r}" for field, value in implied.items())
    raise ValueError(f"transformers has no {table.kind.__name__} with {said}; save it with program.save instead")


def write(table: WeightTable, config: Any, name: str) -> dict[str, Any]:
    """What config.json says of a model of the class `name`."""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    json: dict[str, Any] = {"architectures": [name], "model_type": table.model_type}
    flat = {key: getattr(config, attribute) for key, attribute in table.write.items()}
    changed = {
        key.split(".")[0] for key, attribute in table.write.items() if flat[key] != defaults.get(attribute, _ABSENT)
    }
    for key, value in (flat | dict(table.constants)).items():
        meanings = table.values.get(key, {})
        value = next((theirs for theirs, ours in meanings.items() if ours == value), value)
        group, _, inner = key.rpartition(".")
        if not group:
            json[key] = value
        elif group in changed:
            json.setdefault(group, {})[inner] = value
    return json


def _look_up(json: Mapping[str, Any], key: str) -> Any:
    value: Any = json
    for name in key.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return _ABSENT
        value = value[name]
    return value


def _value(table: WeightTable, key: str, value: Any) -> Any:
    if isinstance(value, Mapping):  # labels by number: what counts is how many
        return len(value)
    return value if isinstance(value, list) else table.values.get(key, {}).get(value, value)
