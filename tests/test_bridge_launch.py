"""Launches on threads that come and go. test_cutedsl.py has the rest of `dsv4_jax.nvidia.ops.helpers.launch`."""

import ctypes
import threading
import types

import pytest

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from dsv4_jax.nvidia.ops.helpers import launch


def test_arguments_are_prepared_once_for_a_thread_number(monkeypatch):
    """XLA may run a program on threads that Python did not start: a `threading.local` is empty at each call there."""
    streams, prepared = [], []

    @ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)
    def run(packed):
        pointers = (ctypes.c_void_p * 22).from_address(packed)
        streams.append(ctypes.c_int64.from_address(pointers[20]).value)
        return 0

    kernel = types.SimpleNamespace(capi_func=run, cuda_result=ctypes.c_int32(), exec_context=None)
    monkeypatch.setattr(launch, "loaded", lambda *key: kernel)
    make = launch.launcher
    monkeypatch.setattr(launch, "launcher", lambda *args: prepared.append(threading.get_ident()) or make(*args))
    one = launch.Launch(launch.compiled, None, "sm_90a", ("kv_cache",), (("blocks", 5),))
    numbers = set()

    def work(stream):
        numbers.add(threading.get_ident())
        one(stream, 1)
        one(stream + 1, 2)

    for i in range(20):  # one after the other, so that the system gives a number again
        thread = threading.Thread(target=work, args=(2 * i,))
        thread.start()
        thread.join()
    assert streams == list(range(40))
    assert sorted(prepared) == sorted(numbers)
