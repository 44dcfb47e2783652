"""Two processes that train one policy: its losses, gradients, weights and metrics are those of one process."""

from typing import Any

import pytest
import torch
from support.policy import assert_same_gradients
from support.replicas import CASES, RANKS, start

pytestmark = pytest.mark.slow

Found = list[dict[str, dict[str, Any]]]

TIMED = ("time/", "perf/mfu", "perf/tokens_per_second", "perf/trained_tokens_per_second")
# How an item is cut, which is up to each rank's budget.
CUT = ("actor/micro_batches", "perf/computed_tokens", "perf/padding_ratio", "perf/shared_prefix")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return start(tmp_path_factory.mktemp("replicas"))


@pytest.mark.parametrize("case", [name for name in CASES if name != "bfloat16"])
def test_two_processes_train_as_one(found: Found, case: str) -> None:
    alone, together = CASES[case](), found[0][case]
    torch.testing.assert_close(together["losses"], alone["losses"], rtol=1e-5, atol=1e-7, equal_nan=True)
    for mine, expected in zip(together["gradients"], alone["gradients"], strict=True):
        assert_same_gradients(mine, expected)
    torch.testing.assert_close(together["weights"], alone["weights"], rtol=1e-5, atol=1e-5)
    for mine, expected in zip(together["metrics"], alone["metrics"], strict=True):
        kept = {name: value for name, value in expected.items() if not name.startswith((*TIMED, *CUT))}
        torch.testing.assert_close({name: mine[name] for name in kept}, kept, rtol=1e-5, atol=1e-6)
        assert mine.keys() == expected.keys()


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_have_the_same_bits(found: Found, case: str) -> None:
    first, *others = ((each[case]["weights"], each[case]["losses"]) for each in found)
    for weights, losses in others:
        assert all(torch.equal(weights[name], value) for name, value in first[0].items())
        torch.testing.assert_close(losses, first[1], rtol=0, atol=0, equal_nan=True)


def test_masters_of_bfloat16_weights_follow_the_sum(found: Found) -> None:
    alone, together = CASES["bfloat16"](), found[0]["bfloat16"]
    for mine, expected in zip(together["gradients"], alone["gradients"], strict=True):
        assert {value.dtype for value in mine.values()} == {torch.float32}
        assert_same_gradients(mine, expected, tolerance=0.05)


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_rank_that_fails_ends_all_with_its_message(found: Found, rank: int) -> None:
    for each in range(RANKS):
        kind = "TrinityError" if each == rank else f"RankError: rank {rank}: TrinityError"
        assert found[each][f"rank {rank} fails"]["error"] == f"{kind}: broken on purpose on {rank}"
