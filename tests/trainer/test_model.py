"""Models: dropout, how log-probabilities are computed, shared prefixes, over architectures of transformers."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from support.errors import refuses
from support.policy import Prepare, batch_of, fit, make_experiences
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from trinity_lightning.common.model_memory import CPU_TOKENS, useful_tokens
from trinity_lightning.config.algorithm import AlgorithmConfig, KLConfig, Layout
from trinity_lightning.config.model import Dropout, LoRAConfig, OptimizerConfig
from trinity_lightning.errors import ModelLoadError
from trinity_lightning.trainer import model as models
from trinity_lightning.trainer.flops import ModelSize
from trinity_lightning.trainer.head import Head, lean_embeddings
from trinity_lightning.trainer.layers import CpuSharedPrefix, attention_implementation
from trinity_lightning.trainer.model import (
    logprob_function,
    logprobs_by_forward,
    logprobs_by_head,
    switch_off_dropout,
    usable_layout,
)
from trinity_lightning.trainer.policy import PolicyModule

# -- dropout is off unless it is asked for: a policy that moves by chance has no ratio of 1 ----------------------------


SMALL: dict[str, Any] = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random GPT-2, whose configuration has three kinds of dropout of 0.1."""
    folder = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=2, n_positions=64)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("dropout", "moves"), [(Dropout.off, False), ("keep", True)])
def test_the_first_ratio_of_several_steps_is_one_without_dropout(gpt2: Path, dropout: str, moves: bool) -> None:
    batches = [batch_of(make_experiences())]
    algorithm = AlgorithmConfig(optimizer_steps=2, max_tokens_per_micro_batch=64)
    policy = PolicyModule(str(gpt2), algorithm, OptimizerConfig(lr=1e-3), dtype="fp32", dropout=dropout)
    trainer = fit(policy, batches, Prepare(batches))
    assert policy.policy.training
    assert (float(trainer.logged_metrics["actor/ppo_kl"]) != 0.0) is moves


@pytest.mark.parametrize(
    "make",
    [
        lambda: GPTNeoXForCausalLM(
            GPTNeoXConfig(**SMALL, intermediate_size=32, hidden_dropout=0.3, attention_dropout=0.3)
        ),
        lambda: MixtralForCausalLM(
            MixtralConfig(
                **SMALL, intermediate_size=32, num_key_value_heads=2, num_local_experts=2, router_jitter_noise=0.3
            )
        ),
    ],
)
def test_nothing_random_is_left_of_a_model_in_training_mode(make) -> None:
    model: nn.Module = make().train()
    tokens = torch.arange(8)[None]

    def changes() -> bool:
        with torch.no_grad():
            return not torch.equal(model(tokens).logits, model(tokens).logits)

    assert changes()
    switch_off_dropout(model)
    assert not changes()


def test_random_shares_are_known_by_their_names() -> None:
    module: Any = nn.Module()
    shares = {
        "attn_drop": 0.1,
        "drop": 0.1,
        "fusion_droppath": 0.1,
        "dropout": 1,
        "drop_mlp_rate": 0.1,
        "layer_drop": 0.1,
    }
    shares |= {
        "drop_path_rate": 0.1,
        "drop_prob": 0.1,
        "embd_pdrop": 0.1,
        "drop_connect_rate": 0.1,
        "moe_jitter_eps": 0.1,
    }
    others = {"xdrope_section": 0.5, "backdrop": 0.5, "drop_last": 1, "token_dropout": True, "dropout_layers": 2}
    for name, value in (shares | others).items():
        setattr(module, name, value)
    switch_off_dropout(module)
    assert {name: getattr(module, name) for name in shares} == dict.fromkeys(shares, 0.0)
    assert {name: getattr(module, name) for name in others} == others


# -- log-probabilities of architectures that do something of their own to their logits, against their own forward pass -


VOCABULARY = 64
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PER_LAYER = {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0}
FULL = {"layer_types": ["full_attention", "full_attention"]}
GEMMA_3N = (
    PER_LAYER | FULL | {"intermediate_size": [32, 32], "activation_sparsity_pattern": [0.0, 0.0], "laurel_rank": 4}
)
MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 2, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
MOE = {"num_local_experts": 2, "intermediate_size_mlp": 32, "num_experts_per_tok": 1}
INKLING = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
INKLING |= {"swa_num_attention_heads": 2, "swa_num_key_value_heads": 2, "swa_head_dim": 16}

HEAD, FORWARD = logprobs_by_head, logprobs_by_forward
ARCHITECTURES: dict[str, tuple[str, dict[str, Any], Any]] = {
    "llama": ("LlamaForCausalLM", {}, HEAD),
    "granite": ("GraniteForCausalLM", {"logits_scaling": 8.0}, HEAD),
    "gemma2": ("Gemma2ForCausalLM", {"final_logit_softcapping": 0.5}, HEAD),
    "gemma3n_text": ("Gemma3nForCausalLM", {"final_logit_softcapping": 0.5} | GEMMA_3N, HEAD),
    "gemma4_text": ("Gemma4ForCausalLM", {"final_logit_softcapping": 0.5} | PER_LAYER | FULL, HEAD),
    "falcon_h1": ("FalconH1ForCausalLM", {"lm_head_multiplier": 0.3} | MAMBA, HEAD),
    "recurrent_gemma": ("RecurrentGemmaForCausalLM", {"logits_soft_cap": 0.5, "lru_width": 32}, HEAD),
    "llama4_text": ("Llama4ForCausalLM", MOE, FORWARD),
    "hyperclovax": ("HyperCLOVAXForCausalLM", {"logits_scaling": 4.0}, FORWARD),
    "modernbert-decoder": ("ModernBertDecoderForCausalLM", {}, FORWARD),
    "inkling_text": ("InklingForCausalLM", INKLING, FORWARD),
}


def build(architecture: str, settings: dict[str, Any]) -> Any:
    """A random model whose logits are far enough from 0 for what is done to them to show."""
    model_class: Any = getattr(transformers, architecture)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**(SIZES | settings)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_are_those_of_the_models_own_logits(name: str, dtype: torch.dtype) -> None:
    architecture, settings, expected = ARCHITECTURES[name]
    model = build(architecture, settings).to(dtype).train()
    function = logprob_function(model)
    assert function is expected
    assert model.training
    tokens = torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([3, 4, 10, 15, 18])  # in both rows
    targets, temperature = torch.tensor([5, 9, 60, 7, 7]), torch.tensor([1.0, 0.7, 1.0, 2.0, 1.0])
    logprobs, entropies = function(model.eval(), {"input_ids": tokens}, positions, targets, temperature)
    whole = model(input_ids=tokens).logits.float().flatten(0, 1)[positions] / temperature[:, None]
    distribution = torch.distributions.Categorical(logits=whole)
    tolerance: dict[str, Any] = {} if dtype == torch.float32 else {"atol": 0.1, "rtol": 0.03}
    torch.testing.assert_close(logprobs, distribution.log_prob(targets), **tolerance)
    torch.testing.assert_close(entropies, distribution.entropy(), **tolerance)
    if dtype == torch.float32:
        weight = model.get_input_embeddings().weight
        (gradient,) = torch.autograd.grad(distribution.log_prob(targets).sum(), weight)
        logprobs.sum().backward()  # a tied head adds to `weight.grad` in place, which `autograd.grad` would not see
        torch.testing.assert_close(weight.grad, gradient, rtol=1e-3, atol=1e-4 * float(gradient.abs().max()))


OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 2}),  # learnt positions
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 2}),
    "opt": ("OPTForCausalLM", {"ffn_dim": 32, "word_embed_proj_dim": 32}),
    "olmo": ("OlmoForCausalLM", {}),  # no vector among its parameters
    "qwen2": ("Qwen2ForCausalLM", {"num_key_value_heads": 1}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 32}),
    "bloom": ("BloomForCausalLM", {"n_layer": 2, "n_head": 2}),
}
OBSTACLES = {
    "gemma2": "sliding_attention",
    "falcon_h1": "hybrid",
    "recurrent_gemma": "sliding_attention",
    "llama4_text": "chunked_attention",
    "modernbert-decoder": "sliding_attention",
    "inkling_text": "hybrid_sliding",
    "mistral": "sliding_attention",
    "bloom": "attn_implementation=sdpa",
}


@pytest.mark.parametrize("name", [*ARCHITECTURES, *OTHERS, "mamba"])
def test_whatever_a_configuration_looks_like_a_run_can_begin(name: str) -> None:
    """A budget and metrics read it: numbers may be missing (Mamba), lists (Gemma 3n), or differ by layer (Gemma 4)."""
    model = build(*(ARCHITECTURES | OTHERS | {"mamba": ("MambaForCausalLM", {})})[name][:2])
    assert useful_tokens(model, torch.device("cpu")) in CPU_TOKENS
    assert ModelSize.of(model).body > 0


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float32) for name in (*ARCHITECTURES, *OTHERS)]
    + [(name, torch.bfloat16) for name in ("llama", "qwen2", "gpt2", "hyperclovax")],
)
def test_prefixes_are_shared_where_that_changes_nothing(name: str, dtype: torch.dtype) -> None:
    architecture, settings = OTHERS[name] if name in OTHERS else ARCHITECTURES[name][:2]
    model = build(architecture, settings).to(dtype)
    switch_off_dropout(model)
    model.set_attn_implementation(attention_implementation("sdpa"))
    lean_embeddings(model)
    function = logprob_function(model.train())
    if name not in OBSTACLES:
        assert usable_layout(Layout.shared_prefix, model, function) is Layout.shared_prefix
        assert usable_layout(Layout.auto, model, function) is Layout.auto
    else:
        assert usable_layout(Layout.auto, model, function) is Layout.padded
        with refuses("algorithm.layout") as refused:
            usable_layout(Layout.shared_prefix, model, function)
        assert architecture in str(refused.value)
        assert OBSTACLES[name] in str(refused.value)
    assert usable_layout(Layout.padded, model, function) is Layout.padded
    assert model.training
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("name", ["llama", "olmo"])
@pytest.mark.parametrize("trained", ["nothing", "embeddings"])
def test_prefixes_are_shared_whatever_is_trained(name: str, trained: str) -> None:
    model = build(*(ARCHITECTURES | OTHERS)[name][:2])
    model.set_attn_implementation(attention_implementation("sdpa"))
    lean_embeddings(model)
    model.requires_grad_(False)
    model.get_input_embeddings().requires_grad_(trained == "embeddings")
    before = [parameter.requires_grad for parameter in model.parameters()]
    assert usable_layout(Layout.shared_prefix, model, logprob_function(model)) is Layout.shared_prefix
    assert [parameter.requires_grad for parameter in model.parameters()] == before


def test_a_policy_is_probed_in_inference_mode() -> None:
    policy = PolicyModule("tiny", AlgorithmConfig(layout=Layout.shared_prefix), dtype="fp32")
    policy.configure_model()
    tokens = [5, 17, 4, 60, 33]
    with torch.inference_mode():
        probed = policy.sequence_logprobs(tokens)
    assert probed == policy.sequence_logprobs(tokens)


class Leaky(nn.Module):
    """A layer behind which each state has something of the one before it, as in a recurrent or convolutional layer."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: torch.Tensor, **settings: Any) -> torch.Tensor:
        hidden = self.layer(hidden, **settings)
        return hidden + 0.1 * nn.functional.pad(hidden, (0, 0, 1, -1))


def test_a_model_that_mixes_neighbours_by_other_means_is_found_out() -> None:
    model = build("LlamaForCausalLM", {})
    model.set_attn_implementation(attention_implementation("sdpa"))
    model.model.layers[0] = Leaky(model.model.layers[0])
    with refuses("algorithm.layout"):
        usable_layout(Layout.shared_prefix, model, logprob_function(model))


def test_what_sharing_prefixes_raises_is_reported(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    def fails(*_arguments: Any) -> Any:
        raise RuntimeError("no compiler")

    model = build("LlamaForCausalLM", {})
    model.set_attn_implementation(attention_implementation("sdpa"))
    function = logprob_function(model)
    monkeypatch.setattr(CpuSharedPrefix, "__call__", fails)
    with refuses("algorithm.layout"):
        usable_layout(Layout.shared_prefix, model, function)
    caplog.clear()
    assert usable_layout(Layout.auto, model, function) is Layout.padded
    (warning,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert "no compiler" in str(warning.exc_info)


def test_prefixes_are_not_shared_under_dropout() -> None:
    model = build("GPT2LMHeadModel", OTHERS["gpt2"][1])
    model.set_attn_implementation(attention_implementation("sdpa"))
    with refuses("algorithm.layout"):
        usable_layout(Layout.shared_prefix, model, logprob_function(model))


def test_the_softcap_of_a_model_with_a_text_part_is_found() -> None:
    text = SIZES | GEMMA_3N | {"final_logit_softcapping": 0.5}
    config = transformers.Gemma3nConfig(text_config=text)
    model = SimpleNamespace(config=config, get_output_embeddings=nn.Identity)
    assert Head.of(model).softcap == 0.5  # type: ignore[arg-type]


def test_a_model_that_looks_ahead_is_refused_by_name() -> None:
    with pytest.raises(ModelLoadError, match="BertLMHeadModel"):
        logprob_function(build("BertLMHeadModel", {}))


def test_a_model_whose_logits_cannot_be_had_for_some_positions_is_refused_by_name() -> None:
    model = build("LlamaForCausalLM", {})
    forward = model.forward
    model.forward = lambda input_ids, use_cache: SimpleNamespace(
        logits=2 * forward(input_ids, use_cache=use_cache).logits
    )
    with pytest.raises(ModelLoadError, match="LlamaForCausalLM"):
        logprob_function(model)


@pytest.mark.parametrize("error", [AttributeError("no head"), ValueError("no mask"), KeyError("no layer")])
def test_whatever_a_models_parts_raise_its_own_forward_pass_is_tried(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_parts(*_arguments: Any) -> Any:
        raise error

    monkeypatch.setattr(models, "logprobs_by_head", by_parts)
    assert logprob_function(build("LlamaForCausalLM", {})) is logprobs_by_forward


@pytest.mark.parametrize("settings", [{}, {"lora": LoRAConfig(r=2)}], ids=["policy, reference and critic", "adapters"])
def test_models_are_loaded_on_the_cpu_whatever_the_default_device_is(settings: dict[str, Any]) -> None:
    """`meta` stands in for the GPU that Lightning makes the default: nothing on it has values."""
    algorithm = {"kl": {"coef": 0.1}, "critic": None if settings else {"lr": 1e-3}}
    policy = PolicyModule("tiny", algorithm, dtype="fp32", **settings)
    with torch.device("meta"):
        policy.configure_model()
    models = [policy, *([] if policy.reference is None else [policy.reference])]
    tensors = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
    assert {tensor.device.type for tensor in tensors} == {"cpu"}
    policy.check_trainable()


def test_a_policy_says_what_its_model_lacks() -> None:
    policy = PolicyModule("tiny", dtype="fp32")
    policy.configure_model()
    policy.policy.forward = lambda **_: SimpleNamespace()
    with pytest.raises(ModelLoadError, match="LlamaForCausalLM"):
        policy.check_trainable()


def test_a_policy_of_such_a_model_trains_on_its_own_log_probabilities(tmp_path: Path) -> None:
    model = build("HyperCLOVAXForCausalLM", {"logits_scaling": 4.0, "vocab_size": 100})
    model.save_pretrained(tmp_path)
    batches = [batch_of(make_experiences())]
    algorithm = AlgorithmConfig(optimizer_steps=2, max_tokens_per_micro_batch=64, kl=KLConfig(coef=0.1))
    policy = PolicyModule(str(tmp_path), algorithm, OptimizerConfig(lr=1e-3), dtype="fp32")
    policy.configure_model()
    tokens = [5, 17, 4, 60, 33]
    distribution = model(input_ids=torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    expected = distribution.gather(-1, torch.tensor(tokens[1:])[:, None]).squeeze(-1).tolist()
    assert policy.sequence_logprobs(tokens) == pytest.approx(expected, abs=1e-5)
    trainer = fit(policy, batches, Prepare(batches))
    assert trainer.global_step == 1
    assert trainer.logged_metrics["actor/ppo_kl"] == 0.0
    assert trainer.logged_metrics["actor/kl_loss"] == 0.0


def no_gpu_memory(*_arguments: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory")


def no_cpu_memory(*_arguments: Any) -> Any:
    return torch.empty(2**60)


@pytest.mark.parametrize("exhausted", [no_gpu_memory, no_cpu_memory])
def test_memory_that_does_not_suffice_is_no_property_of_the_architecture(
    exhausted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "logprobs_by_head", exhausted)
    with pytest.raises(RuntimeError, match="memory"):
        logprob_function(build("LlamaForCausalLM", {}))
