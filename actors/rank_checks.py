"""What one rank does when a tensor-parallel setting is validated.

Every rank is called with the same methods in the same order: most of them run the model, whose layers
wait for the other ranks. Nothing here imports Ray: the command makes a Ray actor of :class:`RankChecks`.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING, Any

from rollout_pool.actors.rank_records import Checked, Rolled, RollPlan, Share, States, TopTwo, Usage
from rollout_pool.actors.rollout_actor import RankInfo, keep_checkout_off_path, prepare_thread
from rollout_pool.config import PoolConfig
from rollout_pool.types import RolloutGroup, RolloutRequest, SamplingParams

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from rollout_pool.actors.engine import Engine
    from rollout_pool.actors.rank_group import RankGroup
    from rollout_pool.actors.worker import Worker

POSITIONS = 64
"""Of a prompt, the last ones, whose states are compared: they are kept for every layer group."""
NUM_LEVELS = 4


class RankChecks:
    """Rank ``rank`` of ``config.tensor_parallel_size``; size 1 is the whole model, without a group."""

    def __init__(self, config: PoolConfig, rank: int, *, threads: int, device: str, timeout_s: float) -> None:
        keep_checkout_off_path()
        self._config = config
        self._rank = rank
        self._threads = threads
        self._device = device
        self._timeout_s = timeout_s
        self._store: Any | None = None
        self._group: RankGroup | None = None
        self._engine: Engine | None = None
        self._worker: Worker | None = None

    def place(self) -> RankInfo:
        """Answered as soon as the process is up."""
        return RankInfo.here(self._rank, self._device)

    def open(self) -> str:
        """Where the other ranks meet this one, which is rank 0."""
        from rollout_pool.actors.rank_group import open_store

        is_one_node = self._config.tensor_parallel_placement == "strict_pack"
        self._store, address = open_store("127.0.0.1" if is_one_node else None)
        return address

    def load(self, address: str | None) -> str:
        """Meet the others, load this rank's part, and make its cache. Returns the dtype, "float32" say."""
        prepare_thread(self._threads)
        from rollout_pool.actors.engine import Engine
        from rollout_pool.actors.rank_group import RankGroup
        from rollout_pool.actors.served_model import serve
        from rollout_pool.actors.worker import Worker

        config, size = self._config, self._config.tensor_parallel_size
        if size > 1:
            assert address is not None
            self._group = RankGroup.join(
                address, self._rank, size, self._device, store=self._store, timeout_s=self._timeout_s
            )
        options: dict[str, Any] = {
            "dtype": config.dtype,
            "device": None if size > 1 else self._device,
            "trust_remote_code": config.trust_remote_code,
            "group": self._group,
            "backend": config.tensor_parallel_backend,
        }
        if self._rank == 0:
            self._engine = Engine(config.model, config.engine, tokenizer=config.tokenizer, **options)
        else:
            served = serve(config.model, config.engine, tokenizer=None, **options)
            self._worker = Worker(served, config.engine)
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def model(self) -> PreTrainedModel:
        """The loaded model, or this rank's shard of it."""
        if self._engine is not None:
            return self._engine.model
        assert self._worker is not None
        return self._worker.runner.model

    def apply(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """``function(model, *arguments)`` on what this rank has loaded."""
        return function(self.model, *arguments)

    def apply_on(self, rank: int, function: Callable[..., Any]) -> Any:
        """``function(model, rank)`` on that rank alone."""
        return function(self.model, rank) if rank == self._rank else None

    def shares(self) -> list[Share]:
        """This rank's tensors beside those of the checkpoint."""
        from rollout_pool.actors.checkpoint import Checkpoint
        from rollout_pool.actors.shard_check import check_shares

        checkpoint = Checkpoint(self._config.model)
        return check_shares(self.model, checkpoint, self._rank, self._config.tensor_parallel_size)

    def all_reduce(self) -> Checked:
        """Sums of tensors that differ by rank, of several sizes, in the model's dtype and in float32."""
        import torch
        import torch.distributed as dist

        if self._group is None:
            return Checked({})
        sums: dict[str, torch.Tensor] = {}
        generator = torch.Generator().manual_seed(1000 + self._rank)
        for dtype in dict.fromkeys((self.model.dtype, torch.float32)):
            for count in (1, 1023, 65_536):
                values = torch.randn(count, generator=generator).to(self._group.device, dtype)
                dist.all_reduce(values)
                sums[f"all-reduce of {count} {str(dtype).removeprefix('torch.')}"] = values
        return _checked(sums)

    def states(self, prompt: Sequence[int]) -> tuple[Checked, States | None]:
        """A plain forward over a prompt: checksums on every rank, the numbers from rank 0."""
        import torch

        from rollout_pool.actors.model_runner import evaluation

        ids = torch.tensor([list(prompt)], device=next(self.model.parameters()).device)
        with evaluation(self.model.modules()):
            out = self.model(input_ids=ids, use_cache=False, output_hidden_states=True)
        layers = len(out.hidden_states) - 1
        found = {
            f"hidden states after layer {level} of {layers}": out.hidden_states[level][0, -POSITIONS:]
            for level in levels(layers)
        }
        logits = out.logits[0, -POSITIONS:]
        checked = _checked({**found, "logits": logits})
        if self._rank:
            return checked, None
        hidden = {name: state.float().cpu().numpy() for name, state in found.items()}
        return checked, States(hidden, logits.float().cpu().numpy())

    def top_two(self, prompt: Sequence[int], completion: Sequence[int]) -> TopTwo | None:
        """The two largest logits at every token of a completion; from rank 0, the others take part."""
        import torch

        from rollout_pool.actors.model_runner import evaluation

        ids = torch.tensor([[*prompt, *completion]], device=next(self.model.parameters()).device)
        with evaluation(self.model.modules()):
            logits = self.model(input_ids=ids, use_cache=False).logits[0, -len(completion) - 1 : -1]
            found = logits.float().topk(2)
        return None if self._rank else TopTwo(found.indices.cpu().numpy(), found.values.cpu().numpy())

    def roll(self, plan: RollPlan) -> Rolled | None:
        """Roll out on rank 0's engine; the others follow it until it is done. Called once."""
        if self._engine is not None:
            rolled = roll(self._engine, plan)
            self._engine.close()
            return rolled
        from rollout_pool.actors.rank_worker import replay

        assert self._worker is not None
        assert self._group is not None
        replay(self._worker, self._group)
        return None

    def usage(self) -> Usage:
        """Memory of this rank."""
        import torch

        owner = self._engine or self._worker
        assert owner is not None
        weights = sum(_local_bytes(parameter) for parameter in self.model.parameters())
        kv = sum(tensor.nbytes for tensor in owner.cache.tensors())
        if self._device == "cuda":
            peak = torch.cuda.max_memory_allocated()
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return Usage(weights, kv, peak)


def roll(engine: Engine, plan: RollPlan) -> Rolled:
    """Greedy tokens; samples of one request per prompt; and the same samples as requests of their own.

    A request's prompt is computed once, so the last ones have it computed for each sample.
    """

    def request(prompt: int, sample: int = 0) -> RolloutRequest:
        return RolloutRequest(plan.prompts[prompt], seed=plan.seed, request_id=prompt, sample_offset=sample)

    def params(n: int, temperature: float = 1.0) -> SamplingParams:
        return SamplingParams(n=n, temperature=temperature, max_new_tokens=plan.new_tokens, ignore_eos=True)

    prompts, samples = range(len(plan.prompts)), range(plan.num_samples)
    whole = [request(prompt) for prompt in prompts]
    greedy = engine.generate(whole, params(1, temperature=0.0))  # it also warms the engine up
    before = monotonic()
    shared = engine.generate(whole, params(plan.num_samples))
    seconds = monotonic() - before
    single = engine.generate([request(p, sample) for p in prompts for sample in samples], params(1))
    apart = [
        _merged(prompt, single[prompt * plan.num_samples : (prompt + 1) * plan.num_samples])
        for prompt in prompts
    ]
    new_tokens = sum(len(sample.token_ids) for group in shared for sample in group.samples)
    return Rolled(greedy, shared, apart, new_tokens, seconds)


def _merged(index: int, groups: Sequence[RolloutGroup]) -> RolloutGroup:
    """Groups of one sample each as one group."""
    return groups[0].replace(
        index=index,
        samples=[sample for group in groups for sample in group.samples],
        error=next((group.error for group in groups if group.error is not None), None),
        timing=replace(groups[0].timing, prefill_tokens=sum(group.timing.prefill_tokens for group in groups)),
    )


def levels(num_layers: int) -> list[int]:
    """Up to four numbers of layers, a quarter of them apart; the last is all of them."""
    quarters = range(1, NUM_LEVELS + 1)
    return sorted({-(-num_layers * quarter // NUM_LEVELS) for quarter in quarters})


def _checked(tensors: dict[str, torch.Tensor]) -> Checked:
    from rollout_pool.actors.checksums import checksum

    return Checked({name: checksum(tensor.detach().cpu()) for name, tensor in tensors.items()})


def _local_bytes(parameter: Any) -> int:
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return int(local.nbytes)
