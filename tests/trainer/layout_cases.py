"""Ragged optimizer batches: groups with one prompt, with prompts that begin alike, of several turns, of an expert."""

from hypothesis import strategies as st

from trinity_lightning.common.experience import EID, Experience
from trinity_lightning.common.optimizer_batch import OptimizerBatch

VOCABULARY = 90
token = st.integers(1, VOCABULARY)


@st.composite
def experiences(draw, prompts=None):
    """One ragged experience: any prompt (none too) and mask, advantage 0 too, an engine's log-probabilities or none."""
    prompt = draw(prompts if prompts is not None else st.lists(token, max_size=6))
    response = draw(st.lists(token, min_size=1, max_size=8))
    count = len(response)
    return Experience(
        tokens=prompt + response,
        prompt_length=len(prompt),
        action_mask=draw(st.lists(st.booleans(), min_size=count, max_size=count)),
        advantages=[draw(st.sampled_from([-1.0, 0.0, 2.0]))] * count,
        logprobs=draw(st.none() | st.just([-0.5] * count)),
        info={"temperature": draw(st.sampled_from([0.5, 1.0]))},
    )


@st.composite
def groups(draw):
    """The rollouts of a task: of its prompt, of a longer one that begins with it (a later turn), or of another one."""
    prompt = draw(st.lists(token, max_size=9))
    later = st.lists(token, max_size=5).map(lambda turn: prompt + turn)
    prompts = st.just(prompt) | later | st.lists(token, max_size=6)
    return draw(st.lists(experiences(prompts), min_size=1, max_size=5))


@st.composite
def batches(draw):
    """An optimizer batch of one to four groups in any order, with one trained token at least."""
    tasks = draw(st.lists(groups(), min_size=1, max_size=4))
    rows = [e for task in tasks for e in task]
    for number, task in enumerate(tasks):
        for run, experience in enumerate(task):
            experience.eid = EID(batch=1, task=number, run=run)
    first = rows[0]
    if first.response_length == 1 and first.prompt_length == 0:  # nothing precedes its only token
        first.prompt_length, first.tokens = 1, first.tokens.repeat(2)
    first.action_mask[-1] = True
    return OptimizerBatch.of(draw(st.permutations(rows)), explore_step=1)
