"""Devices: mesh axis names, the mesh, virtual and absent devices, multi-host start. Only this room touches devices."""

from cjax.mesh.axes import AXES as AXES
from cjax.mesh.axes import BATCH_AXES as BATCH_AXES
from cjax.mesh.axes import COL as COL
from cjax.mesh.axes import DATA as DATA
from cjax.mesh.axes import DEPTH as DEPTH
from cjax.mesh.axes import PIPE as PIPE
from cjax.mesh.axes import ROW as ROW
from cjax.mesh.axes import SEQUENCE as SEQUENCE
from cjax.mesh.axes import TENSOR as TENSOR
from cjax.mesh.axes import ZERO as ZERO
from cjax.mesh.axes import Device as Device
from cjax.mesh.axes import I as I
from cjax.mesh.axes import J as J
from cjax.mesh.axes import K as K
from cjax.mesh.axes import build_mesh as build_mesh
from cjax.mesh.axes import wrong_number_of_devices as wrong_number_of_devices
from cjax.mesh.context import not_nan as not_nan
from cjax.mesh.context import own_context as own_context
from cjax.mesh.devices import compile_lowered as compile_lowered
from cjax.mesh.devices import compiler_options as compiler_options
from cjax.mesh.devices import is_compile_only as is_compile_only
from cjax.mesh.devices import resolve_devices as resolve_devices
from cjax.mesh.devices import simulate as simulate
from cjax.mesh.launch import initialize as initialize
from cjax.mesh.launch import num_launched as num_launched
