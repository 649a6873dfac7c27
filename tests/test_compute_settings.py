"""compute.compile and compute.channels_last: off they change nothing; on they train as before, also after a resume."""

import copy
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vitray.config import load_run
from vitray.data.augment.mixing import DeviceBatch
from vitray.data.stream.batches import Share
from vitray.errors import ConfigError
from vitray.models.network import build_network
from vitray.models.precision import precision_on, round_products, tf32_products
from vitray.training import compiling
from vitray.training.checkpoints import copy_to_host, write_checkpoint
from vitray.training.learner import Learner, build_learner, checkpoint_of, compile_model, resume
from vitray.training.schedule import length_of
from vitray.training.state import TrainState
from vitray.training.step import take_step

CPU, ALONE = torch.device("cpu"), Share(0, 1)
SETTINGS = [
    "model.image_size=32",
    "model.num_classes=5",
    "data.mix={mixup: 0.8, cutmix: 1.0}",
    "optim.batch=8",
    "optim.duration=10 steps",
    "optim.warmup=0 steps",
    "optim.ema.decay=0.9",
    "compute.local_batch=4",
    "compute.workers=1",
]
LAST = ["compute.channels_last=true"]
host: Any = SimpleNamespace(device=CPU, load=lambda _: None, send=lambda _: None)


def run_of(*settings, name="vit_u2x1_8_hmlp_bn"):
    return load_run(None, [f"model.name={name}", *SETTINGS, *settings])


def learner_of(run) -> Learner:
    learner = build_learner(run, host)
    return learner._replace(model=compile_model(learner.model, run))


def steps(run, learner, first, last):
    """Return losses, gradient norms and weights after some steps."""
    results = {}
    for step in range(first, last):
        rng = np.random.default_rng(step)
        images, labels = rng.integers(256, size=(8, 32, 32, 3), dtype=np.uint8), rng.integers(5, size=8)
        places = np.arange(8)
        batch = DeviceBatch(torch.from_numpy(images), torch.from_numpy(labels), places, places)
        results[f"loss and norm {step}"] = take_step(run, step, batch, ALONE, learner, length_of(run.optim, 10))
    assert learner.average is not None
    return results | {name: tensor.clone() for name, tensor in learner.task.state_dict().items()}


def kernels(learner):
    return [tensor for tensor in learner.task.parameters() if tensor.dim() == 4 and tensor.shape[-1] > 1]


def save(folder, run, learner, step):
    copy = copy_to_host(checkpoint_of(run, learner, TrainState(step=step), ALONE))
    write_checkpoint(str(folder), copy.checkpoint)


@pytest.mark.parametrize(
    ("text", "value"),
    [("false", False), ("true", "default"), ("default", "default"), ("reduce-overhead", "reduce-overhead")],
)
def test_the_spellings_of_compile(text, value):
    compute = load_run(None, [f"compute.compile={text}"]).compute
    assert compute.compile == value
    assert compute.has_graphs == (value == "reduce-overhead")


def test_evaluations_compile_without_graphs():
    modes = [False, "default", "reduce-overhead", "max-autotune"]
    computes = [load_run().replace({"compute.compile": mode}).compute for mode in modes]
    assert [each.compile_on("cpu") for each in computes] == [None, *modes[1:]]
    evaluated = [each.compile_on("cpu", graphs=False) for each in computes]
    assert evaluated == [None, "default", "default", "max-autotune-no-cudagraphs"]


def test_auto_compiles_on_a_gpu_alone():
    compute = load_run(None, ["compute.compile=auto"]).compute
    assert [compute.compile_on(device) for device in ("cuda", "cpu")] == ["default", None]
    assert not compute.has_graphs


# Compiles a network in a process of its own, and prints how many of its graphs were found.
COMPILE = """
import torch
from torch._dynamo.utils import counters
from vitray.training.compiling import compiled
network = compiled(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()), "default")
network(torch.randn(2, 8)).sum().backward()
print(counters["aot_autograd"]["autograd_cache_hit"])
"""


@pytest.mark.slow
def test_a_second_start_finds_what_the_first_has_compiled(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    environment |= {"VITRAY_HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "temporary")}
    (tmp_path / "temporary").mkdir()

    def found():
        done = subprocess.run(
            [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=True
        )
        return int(done.stdout)

    assert found() == 0
    assert list((tmp_path / "home" / "compiled").rglob("*.so"))
    assert not list((tmp_path / "temporary").rglob("*.so"))
    assert found() == 1


def test_an_unknown_mode_is_one_message():
    with pytest.raises(ConfigError, match=r"compute\.compile"):
        load_run(None, ["compute.compile=fastest"])


def test_off_neither_compiles_nor_moves_a_weight(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail("it compiles"))
    learner = learner_of(run_of())
    assert learner.model is learner.task
    assert all(kernel.is_contiguous() for kernel in kernels(learner))
    assert all(parameter.grad is None for parameter in learner.task.parameters())


@pytest.mark.parametrize("stem", ["linear", "hmlp_bn", "hmlp_ln"])
def test_channels_last_trains_alike(stem):
    plain, last = (run_of(*more, name=f"vit_u2x1_8_{stem}") for more in ([], LAST))
    learner = learner_of(last)
    assert kernels(learner)
    assert all(kernel.is_contiguous(memory_format=torch.channels_last) for kernel in kernels(learner))
    expected, got = steps(plain, learner_of(plain), 0, 3), steps(last, learner, 0, 3)
    for key, tensor in expected.items():
        torch.testing.assert_close(got[key], tensor, rtol=1e-4, atol=1e-4, msg=key)


@pytest.mark.parametrize("rule", ["adamw", "sgd", "lamb"])
def test_a_resumed_run_with_channels_last_is_the_same_run(rule, tmp_path):
    run = run_of(*LAST, f"optim.rule={rule}")
    whole = steps(run, learner_of(run), 0, 4)
    first = learner_of(run)
    steps(run, first, 0, 2)
    save(tmp_path, run, first, 2)
    second = learner_of(run)
    assert resume(str(tmp_path), second, host).step == 2
    for parameter, state in second.optimizer.state.items():
        like = [value for value in state.values() if torch.is_tensor(value) and value.shape == parameter.shape]
        assert like
        assert all(value.stride() == parameter.stride() for value in like)
    resumed = steps(run, second, 2, 4)
    assert all(torch.equal(tensor, whole[key]) for key, tensor in resumed.items())


@pytest.mark.parametrize(("before", "after"), [([], LAST), (LAST, [])])
def test_channels_last_may_change_on_a_resume(before, after, tmp_path):
    run = run_of(*before)
    whole = steps(run, learner_of(run), 0, 4)
    first = learner_of(run)
    steps(run, first, 0, 2)
    save(tmp_path, run, first, 2)
    changed = run_of(*after)
    second = learner_of(changed)
    resume(str(tmp_path), second, host)
    for key, tensor in steps(changed, second, 2, 4).items():
        torch.testing.assert_close(tensor, whole[key], rtol=1e-4, atol=1e-4, msg=key)


def test_gradients_that_graphs_add_to_are_those_of_a_plain_step(monkeypatch):
    modes = []
    monkeypatch.setattr(torch, "compile", lambda model, mode, dynamic: modes.append(mode) or model)
    plain = run_of()
    expected = steps(plain, learner_of(plain), 0, 3)
    graphs = run_of("compute.compile=reduce-overhead")
    learner = learner_of(graphs)
    places = [parameter.grad.data_ptr() for parameter in learner.task.parameters()]
    got = steps(graphs, learner, 0, 3)
    assert modes == ["reduce-overhead"]
    assert all(torch.equal(got[key], tensor) for key, tensor in expected.items())
    # The memory of the gradients stays: a graph never owns it.
    assert [parameter.grad.data_ptr() for parameter in learner.task.parameters()] == places


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("mode", ["default", "default, deep", "reduce-overhead", "max-autotune"])
def test_each_mode_trains_alike_and_resumes_exactly(mode, tmp_path, monkeypatch):
    torch.compiler.reset()
    mode, _, is_deep = mode.partition(", ")
    monkeypatch.setattr(compiling, "DEEP", 2 if is_deep else compiling.DEEP)
    sgd = "optim.rule=sgd"  # AdamW would make steps of rounding: the gradient of a bias before a batch norm is 0
    plain, run = run_of(sgd), run_of(f"compute.compile={mode}", sgd, *LAST)
    expected, whole = steps(plain, learner_of(plain), 0, 4), steps(run, learner_of(run), 0, 4)
    for key, tensor in expected.items():
        torch.testing.assert_close(whole[key], tensor, rtol=1e-5, atol=1e-5, msg=key)
    first = learner_of(run)
    steps(run, first, 0, 2)
    save(tmp_path, run, first, 2)
    second = learner_of(run)
    resume(str(tmp_path), second, host)
    assert all(torch.equal(tensor, whole[key]) for key, tensor in steps(run, second, 2, 4).items())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch hides it from users
@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_the_blocks_of_a_deep_network_are_compiled_once(monkeypatch, schedule):
    torch.compiler.reset()
    compilations = []
    of_torch = torch.compile

    def backend(graph, _inputs):
        compilations.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda code, mode, dynamic: of_torch(code, backend=backend, dynamic=dynamic))
    settings = "model.drop_path=0.1", f"model.drop_path_schedule={schedule}", "optim.rule=sgd"
    run = run_of("compute.compile=default", *settings, "model.positions=rope", name="vit_u24x1_8")
    learner, plain = learner_of(run), learner_of(run_of(*settings, "model.positions=rope", name="vit_u24x1_8"))
    batch = torch.randn(2, 3, 32, 32)
    for each in (learner, plain):  # compiled code draws otherwise
        each.task.eval()
    outputs = [each.task.vit(batch) for each in (learner, plain)]
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=1e-6)
    assert len(compilations) == (1 if schedule == "constant" else 0), "rates that differ compile the whole network"
    assert (learner.model is learner.task) == (schedule == "constant")
    twin = copy.deepcopy(learner.task.vit)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert not twin(batch).any(), "the copy computes with the weights of the original"
    trace = {}
    learner.task.vit(batch, trace)
    assert len(trace) == 24


@pytest.mark.parametrize(
    "settings",
    [
        ["model.layerscale=0.5"],
        ["model.drop_path=0.5"],
        ["model.drop_path=0.5", "model.drop_path_draw=share"],
        ["model.positions.where=levels", "model.registers=true"],
        ["model.execution=fused", "model.layerscale=0.5"],
        ["model.positions.kind=rope"],
    ],
)
def test_the_blocks_of_a_bf16_residual_stream_add_in_bf16(settings):
    def results(residual, has_autocast):
        torch.manual_seed(0)
        model = run_of(*settings, f"model.residual={residual}", name="vit_u2x2_8").model
        vit, dtypes = build_network(model), set()
        for block in vit.blocks:
            block.register_forward_hook(lambda _, inputs, output: dtypes.update([inputs[0].dtype, output.dtype]))
        images_BCHW = torch.randn(8, 3, 32, 32)
        with torch.autocast("cpu", torch.bfloat16, enabled=has_autocast):
            logits_BK = vit(images_BCHW)
        logits_BK.float().square().sum().backward()
        return logits_BK.float(), next(vit.stem.parameters()).grad, dtypes

    plain, stream = results("fp32", True), results("bf16", True)
    assert (plain[2], stream[2]) == ({torch.float32}, {torch.bfloat16})
    for expected, found in zip(plain[:2], stream[:2], strict=True):
        assert (found - expected).norm() < 0.03 * expected.norm()
    # Without autocast the setting changes nothing.
    exact, same = results("fp32", False), results("bf16", False)
    assert same[2] == {torch.float32}
    assert all(torch.equal(left, right) for left, right in zip(exact[:2], same[:2], strict=True))


@pytest.mark.parametrize("has_bf16", [True, False])
def test_auto_is_the_precision_that_the_device_computes_in(monkeypatch, has_bf16):
    asked = []
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation: asked.append(including_emulation) or has_bf16
    )
    precision_on.cache_clear()
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    wanted = load_run(None, []).compute.precision
    assert wanted == "auto"
    assert precision_on(gpu, wanted) == ("bf16" if has_bf16 else "fp32")
    assert asked == [False]  # what a GPU emulates is slow
    assert precision_on(cpu, wanted) == "fp32"
    assert [precision_on(device, name) for device in (gpu, cpu) for name in ("fp32", "bf16")] == ["fp32", "bf16"] * 2
    precision_on.cache_clear()


@pytest.mark.parametrize("name", ["vit_u2x1_8", "vit_u2x2_8", "vit_u1x1_16_local"])
def test_rounded_weights_give_the_bits_of_autocast(name):
    run = run_of("model.positions=rope", "model.head=mlp", "model.layerscale=0.1", name=name)
    torch.manual_seed(0)
    network = build_network(run.model).eval().requires_grad_(False)
    images = torch.randn(3, 3, 32, 32)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        before = network(images)
        round_products(network)
        assert torch.equal(network(images), before)
    kept = {name for name, tensor in network.named_parameters() if tensor.dtype == torch.float32}
    assert "norm.weight" in kept
    levels = [name for name in kept if ".qkv.weight" in name and name.startswith("blocks")]
    assert bool(levels) == (name == "vit_u2x2_8"), "levels of several branches fold their norms into fp32 weights"


def test_tf32_is_for_a_block_alone():
    gpu, exact = torch.device("cuda"), torch.get_float32_matmul_precision()
    assert exact == "highest"
    with tf32_products(gpu, allowed=True):
        with tf32_products(gpu, allowed=True):  # another thread's, perhaps
            assert torch.get_float32_matmul_precision() == "high"
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == exact
    for device, allowed in ((CPU, True), (gpu, False)):
        with tf32_products(device, allowed):
            assert torch.get_float32_matmul_precision() == exact
