"""What `jax.export` must be told to export the ops for a GPU."""

from jax.export import DisabledSafetyCheck

# `jax.export` refuses custom calls that it does not know. Triton kernels are one of jax-triton's.
EXPORT_DISABLED_CHECKS = (DisabledSafetyCheck.custom_call("triton_kernel_call_ffi"),)
