"""Errors in the user's code end a run in one sentence with file and line; train.log has the traceback."""

import re
from pathlib import Path

import pytest
from support.runs import SMALL, RunTrain, only

CODE = """
import lightning as L
from torch.optim.lr_scheduler import LambdaLR
from trinity_lightning.algorithm.add_strategy import GRPOAddStrategy

class Weighs(GRPOAddStrategy):
    def score(self, rewards, groups, runs):
        return {}["weighs"], {}

class Watches(L.Callback):
    def on_train_batch_end(self, *arguments):
        return {}["watches"]

def slows(optimizer):
    return LambdaLR(optimizer, slower)

def slower(step):
    return 1.0 if step == 0 else {}["slower"]
"""


STRATEGY = ["~add_strategy.grpo", "+add_strategy.mine.name=my_code.Weighs"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "part", "place"),
    [
        (
            ["~add_strategy.grpo", "+add_strategy.mine.name=my_code.Weighs"],
            "add strategy 'my_code.Weighs' raised ",
            "8 in score",
        ),
        (["+callbacks.mine._target_=my_code.Watches"], "", "12 in on_train_batch_end"),
        (["optimizer.lr_scheduler=my_code.slows"], "", "18 in slower"),
    ],
    ids=["strategy", "callback", "schedule"],
)
def test_an_error_in_the_users_code_is_a_sentence_with_its_line(
    arguments: list[str], part: str, place: str, run_train: RunTrain, tmp_path: Path
) -> None:
    (tmp_path / "my_code.py").write_text(CODE)
    done = run_train(tmp_path, "+recipe=grpo", *SMALL, "engine=transformers", "steps=2", *arguments)
    assert done.returncode != 0
    assert re.search(rf"trinity-lightning: .*{part}KeyError: '\w+' \(my_code\.py:{place}\)", done.stdout), done.stdout
    assert "Traceback" not in done.stdout
    if place != "18 in slower":  # which is refused before there is a run
        log = (only(tmp_path, "outputs/grpo/*") / "train.log").read_text()
        assert "Traceback" in log
        assert 'my_code.py", line' in log
