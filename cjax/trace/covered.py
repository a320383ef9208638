"""Which primitives tests have compared with one device under plans of every kind, by version of JAX.

Made by `python tests/covered.py`. A program with another primitive is no less right for it; nobody has looked.
"""

from collections.abc import Mapping

TESTED = ("0.10", "0.11", "0.12")  # versions of JAX that the whole suite has run with
PRIMITIVES: Mapping[str, frozenset[str]] = {
    "0.10": frozenset(
        """
        abs add and argmax bitcast_convert_type broadcast_in_dim concatenate conv_general_dilated convert_element_type
        copy cos cumsum custom_jvp_call div dot_general eq erfc exp gather ge gt integer_pow iota is_finite log logistic
        lt max min mul ne neg or pad pow random_bits random_clone random_fold_in random_split reduce_max reduce_sum
        reduce_window_max reduce_window_sum remat2 reshape rsqrt scan select_n shift_right_logical sin slice split
        square squeeze stop_gradient sub tanh top_k transpose
        """.split()
    ),
    "0.12": frozenset(
        """
        abs add and argmax bitcast_convert_type broadcast_in_dim concatenate conv_general_dilated convert_element_type
        copy cos cumsum custom_jvp_call div dot_general eq erfc exp gather ge gt integer_pow iota is_finite log logistic
        lt max min mul ne neg or pad pow random_bits random_clone random_fold_in random_split reduce_max reduce_sum
        reduce_window_max reduce_window_sum remat2 reshape rsqrt scan select_n shift_right_logical sin slice split
        square squeeze stop_gradient sub tanh top_k transpose
        """.split()
    ),
}
