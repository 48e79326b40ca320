"""The op that a workload calls, found in its jaxpr: so the table of cases need not say it again."""

from typing import NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from bench.cases import Workload
from dsv4_jax import platforms
from dsv4_jax.op import OPS, Op


class Call(NamedTuple):
    """An op, the types of its arguments and its static parameters, and the function that computes the arguments."""

    op: Op
    types: tuple
    params: dict
    implementation: str
    compute_arguments: ClosedJaxpr

    def arguments(self, workload: Workload) -> tuple:
        """The op's arguments, computed from the workload's arrays."""
        flat = jaxpr_as_fun(self.compute_arguments)(*jax.tree.leaves((workload.carry, workload.inputs)))
        return jax.tree.unflatten(jax.tree.structure(self.types), flat)


def find(workload: Workload) -> Call:
    """The op that a workload calls. Where it names no implementation, the platform switch's."""
    closed = jax.make_jaxpr(workload.run)(workload.carry, workload.inputs)
    ops = {op.primitive: op for op in OPS}
    place = next(i for i, equation in enumerate(closed.jaxpr.eqns) if equation.primitive in ops)
    equation = closed.jaxpr.eqns[place]
    op, params = ops[equation.primitive], dict(equation.params["params"])
    types = jax.tree.unflatten(equation.params["tree"], [variable.aval for variable in equation.invars])
    implementation = equation.params["implementation"] or op.choose(platforms.default_target(), *types, **params)
    before = closed.jaxpr.replace(eqns=closed.jaxpr.eqns[:place], outvars=equation.invars)
    return Call(op, types, params, implementation, ClosedJaxpr(before, closed.consts))
