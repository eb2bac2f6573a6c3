"""Models of transformers that select this package's attention by name, held token by token against torch's.

The name has ":flash_attn_func" at its end: transformers looks for the word "flash" in it, and masks wrongly without.
"""

import os

import pytest
import torch
from _inputs import few

transformers = pytest.importorskip("transformers")

VOCABULARY = 97
TOLERANCE = dict(atol=2e-5, rtol=2e-5)  # float32 logits of order 1, after two layers

SMALL = dict(
    vocab_size=VOCABULARY, hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
MODELS = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "mistral": lambda: transformers.MistralConfig(**SMALL, sliding_window=5),
    "gemma2": lambda: transformers.Gemma2Config(
        **SMALL, sliding_window=5, attn_logit_softcapping=1.5, query_pre_attn_scalar=16
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SMALL, sliding_window=5, num_local_experts=2, num_experts_per_tok=1, experts_per_token=1
    ),
}
EAGER = {"gemma2", "gpt_oss"}  # softcap and sinks, which torch's function lacks


@pytest.fixture(scope="module", autouse=True)
def gpt_oss_takes_any_name():
    """GPT-OSS lists the attention that it knows to have sinks, and takes the first of the list for any other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.GptOssPreTrainedModel, "_compatible_flash_implementations", None)
        yield


@pytest.fixture(scope="module")
def name(kernel):
    return os.environ["PORTABLE_KERNELS_TESTED"].split("@")[0] + ":flash_attn_func"


@pytest.fixture(scope="module")
def pair(name, device):
    """pair(model): (with this package's attention, with torch's), of equal weights."""
    made = {}

    def pair(model):
        if model not in made:
            models = []
            for attention in (name, "eager" if model in EAGER else "sdpa"):
                torch.manual_seed(0)
                config = MODELS[model]()
                config.initializer_range = 0.2  # far from uniform attention, and no ties between tokens
                m = transformers.AutoModelForCausalLM.from_config(
                    config, attn_implementation=attention, dtype=torch.float32
                )
                for n, p in m.named_parameters():
                    if "sinks" in n:
                        torch.nn.init.normal_(p)
                models.append(m.to(device).eval())
                models[-1].generation_config.eos_token_id = None
            models[1].load_state_dict(models[0].state_dict())
            made[model] = models
        return made[model]

    return pair


@pytest.fixture
def calls(name, monkeypatch):
    """Which functions of the package transformers called."""
    import transformers.modeling_flash_attention_utils as utils

    called = []
    utils.lazy_import_flash_attention(name)
    for slot in ("_flash_fn", "_flash_varlen_fn", "_flash_with_kvcache_fn"):
        function = getattr(utils, slot)

        def counted(*args, _function=function, _slot=slot, **kwargs):
            called.append(_slot)
            return _function(*args, **kwargs)

        monkeypatch.setattr(utils, slot, counted)
    return called


def tokens(*shape, device="cpu"):
    return torch.randint(3, VOCABULARY, shape).to(device)


def padded(device):
    """Sequences of 9, 4 and 7 tokens, padded on the left."""
    ids, mask = tokens(3, 9, device=device), torch.ones(3, 9, dtype=torch.long, device=device)
    for row, pad in enumerate((0, 5, 2)):
        ids[row, :pad], mask[row, :pad] = 0, 0
    return ids, mask


@pytest.mark.parametrize("model", MODELS)
def test_unpadded(pair, calls, device, model):
    mine, theirs = pair(model)
    ids = tokens(2, 9, device=device)
    with torch.no_grad():
        torch.testing.assert_close(mine(ids).logits, theirs(ids).logits, **TOLERANCE)
    assert set(calls) == {"_flash_fn"}


@pytest.mark.parametrize("model", MODELS)
def test_padded(pair, calls, device, model):
    mine, theirs = pair(model)
    ids, mask = padded(device)
    with torch.no_grad():
        a, b = (m(ids, attention_mask=mask).logits[mask.bool()] for m in (mine, theirs))
    torch.testing.assert_close(a, b, **TOLERANCE)
    assert set(calls) == {"_flash_varlen_fn"}


def test_packed(pair, calls, device):
    """Sequences one after the other, told apart by their positions, as each alone."""
    mine, theirs = pair("llama")
    parts = [tokens(1, n, device=device) for n in (5, 1, 8)]
    positions = torch.cat([torch.arange(p.shape[1], device=device) for p in parts])[None]
    with torch.no_grad():
        packed = mine(torch.cat(parts, 1), position_ids=positions).logits
        alone = torch.cat([theirs(p).logits for p in parts], 1)
    torch.testing.assert_close(packed, alone, **TOLERANCE)
    assert set(calls) == {"_flash_varlen_fn"}


@pytest.mark.parametrize(
    "model, pad, cache",
    few(
        [
            ("llama", True, "static"),
            ("llama", False, None),
            ("mistral", True, None),
            ("gemma2", True, "static"),
            ("gpt_oss", True, None),
        ]
    ),
)
def test_generate(pair, calls, device, model, pad, cache):
    ids, mask = padded(device) if pad else (tokens(2, 6, device=device), None)
    mask = torch.ones_like(ids) if mask is None else mask
    results = []
    for m in pair(model):
        results.append(
            m.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=4,
                do_sample=False,
                cache_implementation=cache,
                disable_compile=True,
                return_dict_in_generate=True,
                output_logits=True,
            )  # fmt: skip
        )
    mine, theirs = results
    assert torch.equal(mine.sequences, theirs.sequences)
    for a, b in zip(mine.logits, theirs.logits):
        torch.testing.assert_close(a, b, **TOLERANCE)
    assert len(calls) == 2 * 4


def test_continuous_batching(pair, name, device, monkeypatch):
    """Requests of different lengths over a paged cache, through flash_attn_with_kvcache.

    transformers wants a version in the name for that, as in org/portable-kernels:flash_attn2: what follows the colon
    is not looked up.
    """
    import transformers.modeling_flash_attention_utils as utils
    from transformers.generation.continuous_batching import initialization

    if device.type != "cuda":  # it says that a CPU has no such path
        monkeypatch.setattr(initialization, "ensure_decode_fast_path_is_available", lambda *args, **kwargs: None)
    mine, theirs = pair("llama")
    first, name = name, name.split(":")[0] + ":flash_attn2"
    mine.set_attn_implementation(name)
    called = []
    decode = utils.lazy_import_flash_attention(name)[0][2]
    monkeypatch.setattr(
        utils, "_flash_with_kvcache_fn", lambda *args, **kwargs: called.append(1) or decode(*args, **kwargs)
    )
    requests = [tokens(n).tolist() for n in (5, 9, 3)]
    done = mine.generate_batch(
        requests,
        generation_config=transformers.GenerationConfig(max_new_tokens=5, do_sample=False, pad_token_id=0),
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            max_blocks_per_request=4, num_blocks=16, page_size=8, max_batch_tokens=64, use_cuda_graph=False
        ),
        progress_bar=False,
    )
    mine.set_attn_implementation(first)
    assert len(called) == 2 * 4 and len(done) == 3
    for result in done.values():
        prompt = torch.tensor([result.prompt_ids], device=device)
        expected = theirs.generate(prompt, max_new_tokens=5, do_sample=False)[0, prompt.shape[1] :]
        assert result.generated_tokens == expected.tolist()


@pytest.mark.parametrize("pad", [False, True])
def test_training(pair, device, pad):
    ids, mask = padded(device) if pad else (tokens(2, 6, device=device), None)
    labels = ids if mask is None else ids.masked_fill(mask == 0, -100)
    grads = []
    for m in pair("llama"):
        m.zero_grad()
        m(ids, attention_mask=mask, labels=labels).loss.backward()
        grads.append([p.grad.clone() for p in m.parameters()])
        m.zero_grad()
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-3)


SIZES = dict(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
PATCHED = {
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**SIZES), add_pooling_layer=False),
    "llama": lambda: transformers.LlamaModel(transformers.LlamaConfig(**SMALL)),
    "mistral": lambda: transformers.MistralModel(transformers.MistralConfig(**SMALL, sliding_window=5)),
    "t5": lambda: transformers.T5EncoderModel(  # adds a bias of its own to the scores
        transformers.T5Config(vocab_size=VOCABULARY, d_model=64, d_ff=48, d_kv=16, num_layers=2, num_heads=4)
    ),
    "bart": lambda: transformers.BartModel(  # another model's keys too
        transformers.BartConfig(
            vocab_size=VOCABULARY, d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48,
        )
    ),
}  # fmt: skip


@pytest.fixture
def attended(kernel, internals, monkeypatch):
    """(query, mask) of each call that models make of the attention that patch_attention puts in."""
    patched, calls = internals("_patched_attention"), []

    def counted(module, query, key, value, mask, *args, **kwargs):
        calls.append((query, mask))
        return attention(module, query, key, value, mask, *args, **kwargs)

    attention = patched.attention
    monkeypatch.setattr(patched, "attention", counted)
    return calls


@pytest.mark.parametrize("model", few(PATCHED))
@pytest.mark.parametrize("pad", [False, True])
def test_patched(kernel, attended, device, model, pad):
    """What the model gave before, with gradients, and again after."""
    torch.manual_seed(0)
    model = PATCHED[model]().to(device).eval()
    ids, mask = padded(device) if pad else (tokens(2, 9, device=device), None)
    if pad and model.config.is_encoder_decoder:
        ids, mask = ids.flip(1), mask.flip(1)

    def run():
        model.zero_grad()
        y = model(input_ids=ids, attention_mask=mask).last_hidden_state
        y = y if mask is None else y * mask[..., None]
        y.square().sum().backward()
        return [y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    before = run()
    report = kernel.patching.patch_attention(model)
    assert report.replaced and not report.kept
    found = run()
    assert len(attended) >= 2
    kernel.patching.unpatch_model(model)
    count, after = len(attended), run()
    assert model.config._attn_implementation == "sdpa" and len(attended) == count
    for a, b, c in zip(before, found, after):
        torch.testing.assert_close(b, a, atol=1e-4, rtol=1e-4)
        assert torch.equal(a, c)


def test_padding_alone_is_not_spread(kernel, attended, device):
    """An encoder's mask is one line of keys a sentence, and whether it hides anything is not asked of the device."""
    model = PATCHED["bert"]().to(device).eval()
    kernel.patching.patch_attention(model)
    asked = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            asked.append(str(func))
            return func(*args, **(kwargs or {}))

    ids, mask = padded(device)
    with torch.no_grad(), Watch():
        model(input_ids=ids, attention_mask=mask)
    assert [m.shape for _, m in attended] == [(3, 1, 1, 9)] * 2 and {m.dtype for _, m in attended} == {torch.bool}
    assert not [name for name in asked if "local_scalar_dense" in name or "nonzero" in name]


def test_patched_generate(kernel, attended, device):
    """Padded prompts over a cache of fixed size."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, initializer_range=0.2)).to(device).eval()
    model.generation_config.eos_token_id = None
    ids, mask = padded(device)
    results = []
    for _ in range(2):
        options = dict(max_new_tokens=4, do_sample=False, cache_implementation="static", disable_compile=True)
        results.append(model.generate(ids, attention_mask=mask, **options))
        kernel.patching.patch_attention(model)
    assert torch.equal(*results) and len(attended) == 2 * 4


def test_patched_compiles_whole(kernel, device, monkeypatch):
    """One graph for batches of any size, with their padding."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset(), counters.clear()
    model = PATCHED["bert"]().to(device).eval()
    kernel.patching.patch_attention(model)
    compiled = torch.compile(model, dynamic=True, fullgraph=True, backend="eager")
    with torch.no_grad():
        for sizes in ((3, 9), (5, 12), (4, 33)):
            ids, mask = tokens(*sizes, device=device), torch.ones(sizes, dtype=torch.long, device=device)
            mask[1, 4:] = 0
            found, expected = (m(input_ids=ids, attention_mask=mask).last_hidden_state for m in (compiled, model))
            torch.testing.assert_close(found, expected, **TOLERANCE)
    assert counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


def test_patched_refuses(kernel, device):
    model = PATCHED["bert"]()
    model.set_attn_implementation("eager")
    assert [k.why for k in kernel.patching.patch_attention(model).kept] == ["its attention is eager, not sdpa"]
    kept = kernel.patching.patch_attention(torch.nn.Linear(2, 2)).kept
    assert [k.why for k in kept] == ["its attention is None, not sdpa"]
    patched = kernel.patching.attention
    q = torch.zeros(1, 2, 4, 8, device=device)
    with pytest.raises(NotImplementedError, match="patch_attention: softcap must be None"):
        patched.attention(model, q, q, q, None, softcap=2.0)
