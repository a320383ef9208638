"""Which primitives tests have compared with one device under plans of every kind, by version of JAX.

Made by `python tests/covered.py`. A program with another primitive is no less right for it; nobody has looked.
"""

from collections.abc import Mapping

TESTED = ("0.10", "0.11", "0.12")  # versions of JAX that the suite has run with, all but the first in parts
PRIMITIVES: Mapping[str, frozenset[str]] = {
    "0.10": frozenset(
        """
        abs acos acosh add add_any and approx_top_k argmax argmin asin asinh atan atan2 atanh bessel_i0e bessel_i1e
        bitcast_convert_type broadcast_in_dim cbrt ceil cholesky clamp complex composite concatenate cond conj
        conv_general_dilated convert_element_type copy cos cosh cumlogsumexp cummax cummin cumprod cumsum
        custom_jvp_call custom_linear_solve custom_vjp_call digamma div dot_general dynamic_slice dynamic_update_slice
        eig eigh empty2 eq erf erf_inv erfc exp exp2 expm1 fft floor gather ge gt igamma igammac imag integer_pow iota
        is_finite jit le lgamma linear_call log log1p logistic lt lt_to lu max min mul name ne neg nextafter not
        optimization_barrier or pad platform_index polygamma pow qr ragged_dot_general random_bits random_clone
        random_fold_in random_gamma random_seed random_split random_unwrap random_wrap real reduce reduce_and reduce_max
        reduce_min reduce_or reduce_precision reduce_prod reduce_sum reduce_window_max reduce_window_min
        reduce_window_sum regularized_incomplete_beta rem remat2 reshape rev round rsqrt scan scatter scatter-add
        scatter-max scatter-min scatter-mul scatter-sub select_and_scatter_add select_n shift_left
        shift_right_arithmetic shift_right_logical sign sin sinh slice sort split sqrt square squeeze stack
        stop_gradient sub svd tan tanh tile top_k transpose triangular_solve tridiagonal_solve unstack while xor
        """.split()
    ),
    "0.11": frozenset(
        """
        abs acos acosh add add_any and approx_top_k argmax argmin asin asinh atan atan2 atanh bessel_i0e bessel_i1e
        bitcast_convert_type broadcast_in_dim cbrt ceil cholesky clamp complex composite concatenate cond conj
        conv_general_dilated convert_element_type copy cos cosh cumlogsumexp cummax cummin cumprod cumsum
        custom_jvp_call custom_linear_solve custom_vjp_call digamma div dot_general dynamic_slice dynamic_update_slice
        eig eigh empty2 eq erf erf_inv erfc exp exp2 expm1 fft floor gather ge gt igamma igammac imag integer_pow iota
        is_finite jit le lgamma linear_call log log1p log2 logistic lt lt_to lu max min mul name ne neg nextafter not
        one_minus_square optimization_barrier or pad platform_index polygamma pow qr ragged_dot_general random_bits
        random_clone random_fold_in random_gamma random_seed random_split random_unwrap random_wrap real reduce
        reduce_and reduce_max reduce_min reduce_or reduce_precision reduce_prod reduce_sum reduce_window_max
        reduce_window_min reduce_window_sum regularized_incomplete_beta rem remat2 reshape rev round rsqrt scan scatter
        scatter-add scatter-max scatter-min scatter-mul scatter-sub select_and_scatter_add select_n shift_left
        shift_right_arithmetic shift_right_logical sign sin sinh slice sort split sqrt square squeeze stack
        stop_gradient sub svd tan tanh tile top_k transpose triangular_solve tridiagonal_solve unstack while xor
        """.split()
    ),
    "0.12": frozenset(
        """
        abs acos acosh add add_any and approx_top_k argmax argmin asin asinh atan atan2 atanh bessel_i0e bessel_i1e
        bitcast_convert_type broadcast_in_dim call_hi_primitive cbrt ceil cholesky clamp complex composite concatenate
        cond conj conv_general_dilated convert_element_type copy cos cosh cumlogsumexp cummax cummin cumprod cumsum
        custom_jvp_call custom_linear_solve custom_vjp_call digamma div dot_general dynamic_slice dynamic_update_slice
        eig eigh empty2 eq erf erf_inv erfc exp exp2 expm1 fft floor gather ge gt igamma igammac imag integer_pow iota
        is_finite jit le lgamma linear_call log log1p log2 logistic lt lu max min mul name ne neg nextafter not
        one_minus_square optimization_barrier or pad platform_index polygamma polynomial pow qr ragged_dot_general
        random_bits random_clone random_fold_in random_gamma random_seed random_split random_unwrap random_wrap real
        reduce reduce_and reduce_max reduce_min reduce_or reduce_precision reduce_prod reduce_sum reduce_window_max
        reduce_window_min reduce_window_sum regularized_incomplete_beta rem remat2 reshape rev round rsqrt scan scatter
        scatter-add scatter-max scatter-min scatter-mul scatter-sub select_and_scatter_add select_n shift_left
        shift_right_arithmetic shift_right_logical sign sin sinh slice sort split sqrt square squeeze stack
        stop_gradient sub svd tan tanh tile top_k transpose triangular_solve tridiagonal_solve unstack while xor
        """.split()
    ),
}
