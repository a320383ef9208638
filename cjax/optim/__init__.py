"""Optimizers for large batches, and what optax leaves to its users; whatever optax has stays optax's.

Their norms are right under every plan, since cjax gives an optimizer the user's own tree.
"""

from cjax.optim import schedules as schedules
from cjax.optim.averages import ParamsEmaState as ParamsEmaState
from cjax.optim.averages import find_ema as find_ema
from cjax.optim.averages import params_ema as params_ema
from cjax.optim.lamb import lamb as lamb
from cjax.optim.lars import lars as lars
from cjax.optim.loss_scale import LossScale as LossScale
from cjax.optim.loss_scale import LossScaleState as LossScaleState
from cjax.optim.loss_scale import count_skipped as count_skipped
from cjax.optim.masks import weights_only as weights_only
from cjax.optim.noise_scale import NoiseState as NoiseState
from cjax.optim.noise_scale import init_noise as init_noise
from cjax.optim.noise_scale import measure_noise as measure_noise
from cjax.optim.noise_scale import noise_scale as noise_scale
from cjax.optim.trust import scale_by_trust_ratio as scale_by_trust_ratio
