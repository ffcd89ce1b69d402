# SPDX-License-Identifier: Apache-2.0
"""Other functions of an operator's signature, made of its own code.

An operator is one Python function: its parameters with their defaults, what it does to them, and
``OPERATOR.call(arrays, params, ...)`` at its end.  Its plan function, the questions about SoCs and
``scenario_of`` take the same arguments, read in the same way, and ask the Operator for something
else.  So they are that very code with another object under the Operator's name: an argument is
added in one place, and each is one frame of Python, which a wrapper would make two of.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any, ParamSpec, TypeVar

from kvcore._core.plan import Operator, Plan

__all__ = ["plan_twin", "twin"]

P = ParamSpec("P")
R = TypeVar("R")


def twin(
    function: Callable[P, Any],
    operator: Operator,
    ask: Callable[..., R],
    *,
    name: str,
    returns: type,
    doc: str,
    module: str | None = None,
) -> Callable[P, R]:
    """A function of the same parameters that calls ``ask`` where the other has the operator run.

    ask: takes what Operator.call takes.  returns: the type it is annotated with.
    module: where it is to be found; None: in the module of the other.
    """
    assert isinstance(function, FunctionType)
    own, code = function.__globals__, function.__code__
    (spelled,) = [word for word in code.co_names if own.get(word) is operator]
    around = {**own, spelled: SimpleNamespace(call=ask), returns.__name__: returns}
    code = code.replace(co_name=name, co_qualname=name)
    made = FunctionType(code, around, name, function.__defaults__)
    made.__kwdefaults__ = dict(function.__kwdefaults__ or {})
    made.__annotations__ = {**function.__annotations__, "return": returns.__name__}
    made.__doc__ = doc
    made.__module__ = module or function.__module__
    return made


def plan_twin(
    function: Callable[P, Any], operator: Operator, more: str = "", *, module: str | None = None
) -> Callable[P, Plan]:
    """The plan function of an operator; more: what its docstring says besides."""
    name = function.__name__
    doc = f"A Plan of {name} with the same arguments: run() it any number of times.{more}"
    return twin(
        function,
        operator,
        operator.plan,
        name=f"plan_{name}",
        returns=Plan,
        doc=doc,
        module=module,
    )
