"""How DTensors go through ops: where whole rows lie on a process, it runs the op on those that it has.

Which dimensions are rows follows from `differentiable`'s rowwise: one more leading dimension is one more batch. So the
first of a tensor's is a batch if the same call is valid without it, and so on. Gradients of what all rows share are
sums over them. Imported when a DTensor is seen, no sooner.
"""

import functools
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor.experimental import register_sharding


class _Like(NamedTuple):
    shape: tuple
    dtype: torch.dtype


class _Rule(NamedTuple):
    rows: tuple  # positions of the tensors of rows
    lead: int  # how many of their dimensions are rows
    results: tuple  # of each result: Shard, Partial or Replicate where rows are sharded


def register(op, reference, rowwise):
    """Tell PyTorch, once, how `op` (an OpOverload) may be sharded: on rows, else not at all."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    if op not in propagator.op_strategy_funcs:
        register_sharding(op)(lambda *args: _placements(op, reference, rowwise, args))
        propagator.op_to_schema_info[op] = RuntimeSchemaInfo(0, needs_pytree=True)  # bools and strings count too


def keeps_rows(reference, rowwise, args):
    """Whether the rule lets these shards lie where they are."""
    rule = _cached_rule(reference, rowwise, _described(args))
    placed = {i: a.placements for i, a in enumerate(args) if isinstance(a, DTensor)}
    for at in zip(*placed.values()):
        shards = {i: p for i, p in zip(placed, at) if not p.is_replicate() and not p.is_partial()}
        dims = {p.dim if type(p) is Shard else -1 for p in shards.values()}
        if shards and not (rule and len(dims) == 1 and 0 <= min(dims) < rule.lead and {*shards} <= {*rule.rows}):
            return False
    return rule is not None


def _placements(op, reference, rowwise, args):
    """[(placements of the results, placements of the arguments)], as of register_sharding."""
    rule = _rule(reference, rowwise, _described(args))
    whole = [Replicate() if hasattr(a, "tensor_meta") else None for a in args]
    found = [([Replicate()] * len(op._schema.returns), whole)]
    for dim in range(rule.lead if rule else 0):
        results = [Shard(dim) if kind is Shard else kind() for kind in rule.results]
        found.append((results, [Shard(dim) if i in rule.rows else given for i, given in enumerate(whole)]))
    return found


def _described(args):
    """The arguments, tensors by shape and dtype."""

    def described(a):
        meta = a if isinstance(a, torch.Tensor) else getattr(a, "tensor_meta", None)
        return tuple(a) if isinstance(a, list) else a if meta is None else _Like(tuple(meta.shape), meta.dtype)

    return tuple(map(described, args))


def _rule(reference, rowwise, args):
    def made(args):
        return [torch.empty(a.shape, dtype=a.dtype) if isinstance(a, _Like) else a for a in args]

    def shapes(args):
        results = reference(*made(args))
        return [t.shape for t in (results if isinstance(results, tuple) else (results,))]

    def rows_of(args):  # for the gradients of rows alone, whatever else is asked for
        return tuple(rowwise(*[False if isinstance(a, bool) else a for a in made(args)]) or ())

    with FakeTensorMode():
        if rowwise is None or not (rows := rows_of(args)):
            return None
        whole, lead, results = shapes(args), 0, ()
        last = 0 if hasattr(rowwise, "every") else 1  # of a row itself
        while rows_of(args) == rows:
            ndims = [len(args[i].shape) for i in rows]
            if min(ndims) == 0 or max(ndims) == last:
                break
            args = tuple(a._replace(shape=a.shape[1:]) if i in rows else a for i, a in enumerate(args))
            try:
                part = shapes(args)
            except Exception:
                break
            kinds = tuple(
                Shard if p == w[lead + 1 :] else None if p != w else Partial if p.numel() else Replicate
                for p, w in zip(part, whole)
            )
            if None in kinds:
                break
            lead, results = lead + 1, kinds
    return _Rule(rows, lead, results) if lead else None


_cached_rule = functools.lru_cache(4096)(_rule)
