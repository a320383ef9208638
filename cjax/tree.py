"""Path names of leaves: how cjax addresses one array in the user's own tree; and what messages call a value in it."""

from typing import Any, TypeAlias

import jax

# Containers of arrays, or of shapes, as JAX flattens them: the types of Python have no word for it.
PyTree: TypeAlias = Any


def path_name(path: tuple[Any, ...]) -> str:
    """The name of a leaf, such as `params/Dense_0/kernel`, from a `jax.tree_util` key path.

    Attributes that only wrap the array (`.value` of Flax's boxes and variables) are left out, so that the name is
    the one the author of the model would write.
    """
    parts = []
    for key in path:
        match key:
            case jax.tree_util.DictKey(key=name):
                parts.append(str(name))
            case jax.tree_util.SequenceKey(idx=index):
                parts.append(str(index))
            case jax.tree_util.GetAttrKey(name="value"):
                continue
            case jax.tree_util.GetAttrKey(name=name):
                parts.append(name)
            case jax.tree_util.FlattenedIndexKey(key=index):
                parts.append(str(index))
            case _:
                parts.append(str(key))
    return "/".join(parts)


def kind_of(value: object) -> str:
    """What messages call a value that is of another type than it should be.

    >>> kind_of(3), kind_of({})
    ('an int', 'a dict')
    """
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIO' else 'a'} {name}"


def leaf_names(tree: PyTree) -> tuple[str, ...]:
    """The names of all leaves of `tree`, in `jax.tree.leaves` order.

    >>> leaf_names({"dense": {"kernel": 1, "bias": 2}})
    ('dense/bias', 'dense/kernel')
    """
    return tuple(path_name(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0])
