"""`jax_triton.triton_call`, with what jax-triton 0.4.1 lacks put right; no other module imports jax_triton.

0.4.1 is the newest release. When a newer one is required, try the lowering tests without each function here, and delete
those that they pass without.
"""

import jax
import jaxlib.gpu_triton
from jax._src.interpreters import partial_eval
from jax_triton import triton_call, triton_lib
from triton.backends.amd.compiler import HIPBackend

from dsv4_jax import platforms

__all__ = ["triton_call"]


def _accept_third_argument_of_dce_rules():
    """jax 0.12: "_triton_kernel_call_dce_rule() takes 2 positional arguments but 3 were given".

    Rules of dead code elimination are told which inputs are alive, too; this one keeps them all.
    """
    if jax.__version_info__ < (0, 12):
        return
    rule = partial_eval.dce_rules[triton_lib.triton_kernel_call_p]
    partial_eval.dce_rules[triton_lib.triton_kernel_call_p] = lambda used, live, eqn: rule(used, eqn)  # pyrefly: ignore


def _give_options_to_hip_backend():
    """ROCm, Triton 3.7 and newer: "KeyError: 'num_ctas'".

    Triton's AMD backend reads options out of the metadata, where `triton.compile` puts them; jax-triton's are empty.
    """
    make_ttir = HIPBackend.make_ttir

    def make_ttir_of_options(module, metadata, options):
        for name, value in vars(options).items():
            metadata.setdefault(name, value)
        return make_ttir(module, metadata, options)

    HIPBackend.make_ttir = staticmethod(make_ttir_of_options)  # pyrefly: ignore


def _read_rocm_arch_from_abstract_device():
    """ROCm without a GPU: jax-triton asks for a local GPU's architecture alone; for CUDA it can be told."""
    jaxlib.gpu_triton.get_arch_details = lambda device: platforms.lowered_for().arch


_accept_third_argument_of_dce_rules()
_give_options_to_hip_backend()
_read_rocm_arch_from_abstract_device()
