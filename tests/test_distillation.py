"""Distillation: DeiT's two-headed network, the two targets of a teacher, and a teacher that does not fit the run."""

import json
import math

import pytest
import timm
import torch
import torch.nn.functional as F
from networks import difference, scrambled
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import DeiTConfig, DeiTForImageClassificationWithTeacher

from vitray.config import Model, Run, load_run
from vitray.config.augmentation import Normalize
from vitray.config.classification import Distillation, Supervised
from vitray.data.augment.mixing import normalized
from vitray.errors import ConfigError
from vitray.models.other_networks import OtherNetwork, other_sizes
from vitray.models.vit import ViT
from vitray.tasks.build import build_task
from vitray.tasks.supervised import Classification, Teacher, distillation_loss, renormalize, soft_cross_entropy
from vitray.training.optim import build_optimizer
from vitray.weights import import_weights, save_model
from vitray.weights.export import LIBRARIES, export_weights, write_library
from vitray.weights.pretrained import adapt, open_teacher

CLASSES = 5
TINY = {"name": "vit_u2x1_8", "image_size": 32, "num_classes": CLASSES}
NAMES = [f"class {label}" for label in range(CLASSES)]
LABELS = torch.tensor([0, 3, 3, 4])


def two_headed(**settings) -> ViT:
    return scrambled(ViT(Model.model_validate(TINY | {"distillation_token": True} | settings)))


def images(count=4) -> torch.Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def logits(seed: int) -> torch.Tensor:
    return 3 * torch.randn(4, CLASSES, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---- the network with two heads --------------------------------------------------------------------------------------


def timm_deit():
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2, "num_classes": CLASSES}
    return scrambled(timm.create_model("deit_base_distilled_patch16_224", **sizes))


def hugging_face_deit():
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256}
    config = DeiTConfig(**sizes, image_size=32, patch_size=8, num_labels=CLASSES)
    return scrambled(DeiTForImageClassificationWithTeacher(config))


@torch.no_grad()
def test_timms_distilled_deit_is_imported_with_both_heads(tmp_path):
    theirs = timm_deit()
    save_file(theirs.state_dict(), tmp_path / "w.safetensors")
    run, ours = import_weights(str(tmp_path / "w.safetensors"), settings={"heads": 2, "normalize": {}})
    assert run.model.distillation_token
    theirs.train().set_distilled_training(True)
    pooled_BD = ours.pooled(ours.tokens(images()))
    assert pooled_BD.shape == (4, ours.width)
    for got, expected in zip(ours.head.both(pooled_BD), theirs(images()), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert difference(ours, theirs.eval(), 32) < 1e-7


@pytest.mark.parametrize("in_memory", [False, True])
@torch.no_grad()
def test_hugging_faces_distilled_deit_is_imported_with_both_heads(tmp_path, in_memory):
    theirs = hugging_face_deit()
    theirs.save_pretrained(tmp_path)
    if in_memory:
        save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    run, ours = import_weights(str(tmp_path), settings={"normalize": {}})
    assert (run.model.norm_eps, run.model.distillation_token) == (1e-12, True)
    got, expected = ours.head.both(ours.pooled(ours.tokens(images()))), theirs(images())
    torch.testing.assert_close(got[0], expected.cls_logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got[1], expected.distillation_logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours(images()), expected.logits, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_network_with_two_heads_is_exported_to_timm_and_back(tmp_path):
    ours, theirs = two_headed(), timm_deit()
    theirs.load_state_dict(export_weights(ours, "timm"))
    assert difference(ours, theirs, 32) < 1e-7
    ours.float()
    save_file(export_weights(ours, "timm"), tmp_path / "w.safetensors")
    _, back = import_weights(str(tmp_path / "w.safetensors"), settings={"heads": 2, "normalize": {}})
    assert all(torch.equal(back.state_dict()[name], tensor) for name, tensor in ours.state_dict().items())
    assert "timm.create_model('deit_base_distilled_patch16_224', img_size=(32, 32)" in LIBRARIES["timm"].program(ours)


@torch.no_grad()
def test_a_network_with_two_heads_is_exported_to_hugging_face(tmp_path):
    ours = two_headed(norm_eps=1e-12)
    write_library(ours, "hf", tmp_path, NAMES)
    theirs = DeiTForImageClassificationWithTeacher.from_pretrained(tmp_path).eval()
    assert difference(ours, theirs, 32) < 1e-7
    assert theirs.config.id2label[4] == "class 4"
    assert set(load_file(tmp_path / "model.safetensors")) == set(export_weights(ours.float(), "hf"))


@pytest.mark.parametrize(
    ("layout", "settings", "named"),
    [
        ("torchvision", {}, "torchvision has no distillation token"),
        ("hf", {"head": "mlp"}, "hf has no head of two layers"),
        ("timm", {"head": "mlp"}, "timm has no head of two layers"),
    ],
)
def test_libraries_without_two_such_heads_are_refused(layout, settings, named):
    with pytest.raises(ConfigError, match=named):
        export_weights(two_headed(**settings), layout)


@torch.no_grad()
def test_a_new_head_is_two_heads_of_zeros():
    ours = two_headed(head="mlp")
    state = adapt(ours, ours.model.model_copy(update={"num_classes": 3}), "weights", new_head=False)
    new = ViT(ours.model.model_copy(update={"num_classes": 3})).eval()
    new.load_state_dict(state)
    assert not new(images()).any()
    assert new.head.class_token[0].weight.any()
    with pytest.raises(ConfigError, match=r"model\.distillation_token: got true, expected false"):
        adapt(ours, Model.model_validate(TINY), "weights", new_head=False)


# ---- the loss --------------------------------------------------------------------------------------------------------


def softmax(row: list[float]) -> list[float]:
    powers = [math.exp(each - max(row)) for each in row]
    return [power / sum(powers) for power in powers]


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_the_soft_target_is_the_papers_formula(temperature):
    total = 0.0
    for own, taught in zip(logits(1).tolist(), logits(2).tolist(), strict=True):
        p = softmax([each / temperature for each in own])
        q = softmax([each / temperature for each in taught])
        total += temperature**2 * sum(q[k] * (math.log(q[k]) - math.log(p[k])) for k in range(CLASSES))
    settings = Distillation(teacher="t", target="soft", temperature=temperature)
    assert float(distillation_loss(logits(1), logits(2), settings)) == pytest.approx(total / 4, rel=1e-5)


def test_the_hard_target_is_the_teachers_most_probable_class():
    total = 0.0
    for own, taught in zip(logits(1).tolist(), logits(2).tolist(), strict=True):
        total -= math.log(softmax(own)[taught.index(max(taught))])
    got = distillation_loss(logits(1), logits(2), Distillation(teacher="t"))
    assert float(got) == pytest.approx(total / 4, rel=1e-5)


def test_the_soft_loss_is_least_where_the_answers_agree():
    settings = Distillation(teacher="t", target="soft", temperature=2.0)
    own = (logits(2) + 7).requires_grad_()  # softmax ignores the shift
    loss = distillation_loss(own, logits(2), settings)
    (gradient,) = torch.autograd.grad(loss, own)
    assert abs(loss.item()) < 1e-5
    assert gradient.abs().max() < 1e-6
    assert distillation_loss(own + 0.1 * logits(3), logits(2), settings) > loss


def task(distill: dict, teacher: Teacher | None, **settings) -> Classification:
    torch.manual_seed(0)
    changes = {f"model.{name}": value for name, value in (TINY | settings).items()}
    return build_task(Run().replace(changes | {"task.distill": {"teacher": "t"} | distill}), teacher=teacher)


def teacher(seed=7, normalize: Normalize | None = None) -> Teacher:
    return Teacher(scrambled(ViT(Model.model_validate(TINY)), seed), normalize or Normalize())


TARGETS = F.one_hot(LABELS, CLASSES).float()


@pytest.mark.parametrize("distill", [{}, {"target": "soft", "weight": 0.1, "temperature": 3.0}])
def test_each_head_has_its_own_term(distill):
    module, wise = task(distill, teacher(), distillation_token=True), teacher()
    theirs = timm_deit()
    theirs.load_state_dict(export_weights(module.vit, "timm"))
    theirs.train().set_distilled_training(True)
    own, taught = theirs(images())
    answers = wise.logits(images(), Normalize())
    settings = module.settings.distill
    share = settings.weight
    expected = (1 - share) * F.cross_entropy(own, LABELS) + share * distillation_loss(taught, answers, settings)
    torch.testing.assert_close(module(images(), TARGETS), expected)


def test_without_a_distillation_token_both_terms_read_the_only_head():
    module = task({"weight": 0.3}, teacher())
    own, answers = module.vit(images()), teacher().logits(images(), Normalize())
    expected = 0.7 * F.cross_entropy(own, LABELS) + 0.3 * F.cross_entropy(own, answers.argmax(1))
    torch.testing.assert_close(module(images(), TARGETS), expected)


def test_a_network_of_torchvision_learns_from_a_teacher_with_its_only_head():
    torch.manual_seed(0)
    model = {"name": "torchvision/resnet18", "image_size": 32, "num_classes": CLASSES}
    run = Run().replace({"model": model, "task.distill": {"teacher": "t", "weight": 0.3}})
    module = build_task(run, teacher=teacher())
    own, answers = module.vit(images()), teacher().logits(images(), Normalize())
    expected = 0.7 * F.cross_entropy(own, LABELS) + 0.3 * F.cross_entropy(own, answers.argmax(1))
    torch.testing.assert_close(module(images(), TARGETS), expected)


def test_without_a_teacher_the_mean_of_the_heads_learns_the_labels():
    changes = {f"model.{name}": value for name, value in (TINY | {"distillation_token": True}).items()}
    module = build_task(Run().replace(changes))
    torch.testing.assert_close(
        module(images(), TARGETS), soft_cross_entropy(module.vit(images()), TARGETS, Supervised(smoothing=0.0))
    )


def test_a_teacher_is_neither_trained_nor_saved_and_answers_as_in_evaluation():
    dropping = ViT(Model.model_validate(TINY | {"dropout": 0.5, "drop_path": 0.5}))
    wise = Teacher(scrambled(dropping).train(), Normalize())
    module = task({}, wise).train()
    module(images(), TARGETS).backward()
    assert {name.partition(".")[0] for name in module.state_dict()} == {"vit"}
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in wise.network.parameters())
    assert all(parameter.grad is not None for parameter in module.parameters())
    assert torch.equal(wise.logits(images(), Normalize()), wise.logits(images(), Normalize()))


def test_a_teacher_computes_in_bfloat16():
    wise, seen = teacher(), []
    wise.network.blocks[0].attn1.qkv.register_forward_hook(lambda *each: seen.append(each[2].dtype))
    answers = wise.logits(images(), Normalize())
    assert seen == [torch.bfloat16]
    assert answers.dtype == torch.float32
    assert not answers.requires_grad
    exact = wise.network(images())
    assert (answers - exact).abs().max() < 0.05 * exact.abs().max()


def test_a_teacher_sees_images_under_its_own_normalization():
    pixels = torch.randint(256, (2, 32, 32, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    other = Normalize(mean=(0.5, 0.4, 0.3), std=(0.5, 0.25, 0.2))
    for before, after in ((Normalize(), other), (other, Normalize()), (other, other)):
        got = renormalize(normalized(pixels, before), before, after)
        torch.testing.assert_close(got, normalized(pixels, after), atol=1e-5, rtol=1e-5)


def test_a_task_that_only_evaluates_needs_no_teacher():
    module = task({}, None)
    assert module.vit(images()).shape == (4, CLASSES)
    with pytest.raises(AssertionError, match="only evaluates"):
        module(images(), TARGETS)


@pytest.mark.slow
def test_a_distilling_task_compiles():
    torch.compiler.reset()
    module = task({}, teacher(), distillation_token=True)
    compiled = torch.compile(module, backend="aot_eager")
    torch.testing.assert_close(compiled(images(), TARGETS), module(images(), TARGETS), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("target", ["hard", "soft"])
def test_a_network_learns_to_answer_as_its_teacher_in_200_steps(target):
    torch.manual_seed(3)
    convolution = nn.Sequential(nn.Conv2d(3, 8, 8, 8), nn.GELU(), nn.Flatten(), nn.Linear(128, CLASSES))
    nn.init.normal_(convolution[-1].weight)
    module = task({"target": target, "weight": 1.0}, Teacher(convolution, Normalize()), distillation_token=True).train()
    answers = module.teacher.logits(images(16), Normalize())
    assert len(set(answers.argmax(1).tolist())) > 1
    run = load_run(None, ["optim.lr=2e-3", "optim.weight_decay=0"])
    optimizer = build_optimizer(module, run.optim, torch.device("cpu"))
    wrong = F.one_hot((answers.argmax(1) + 1) % CLASSES, CLASSES).float()  # labels, which have no weight
    for _ in range(200):
        loss = module(images(16), wrong)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    vit = module.vit.eval()
    taught = vit.head.both(vit.pooled(vit.tokens(images(16))))[1]
    assert loss.item() < 0.05
    assert torch.equal(taught.argmax(1), answers.argmax(1))


# ---- the teacher of a run --------------------------------------------------------------------------------------------


def student(**settings) -> Run:
    changes = {f"model.{name}": value for name, value in (TINY | settings).items()}
    return Run().replace(changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    url = str(tmp_path_factory.mktemp("teacher") / "model")
    run = student().replace({"data.normalize": {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}})
    save_model(url, run, scrambled(ViT(run.model)), NAMES)
    return url


def test_a_model_folder_is_a_teacher_with_its_own_normalization_and_cost(folder):
    source = open_teacher(student(), Distillation(teacher=folder), NAMES)
    assert source.normalize.mean == (0.5, 0.5, 0.5)
    assert 0.0001 < source.gflops < 0.01
    assert source.url == folder
    assert source.name == "vit_u2x1_8"
    assert not any(parameter.requires_grad for parameter in source.network.parameters())


def test_a_network_of_torchvision_is_a_teacher(tmp_path):
    run = Run().replace({"model": {"name": "torchvision/resnet18", "image_size": 32, "num_classes": CLASSES}})
    network = scrambled(OtherNetwork(run.model))
    save_model(str(tmp_path / "model"), run, network, NAMES)
    source = open_teacher(student(), Distillation(teacher=str(tmp_path / "model")), NAMES)
    assert (source.name, source.gflops) == ("torchvision/resnet18", other_sizes(run.model).gflops)
    with torch.no_grad():
        torch.testing.assert_close(source.network(images()), network.float()(images()))


def test_a_weights_file_of_another_library_is_a_teacher(tmp_path):
    theirs = hugging_face_deit()
    theirs.save_pretrained(tmp_path)
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(half))
    source = open_teacher(student(), Distillation(teacher=str(tmp_path)), NAMES)
    with torch.no_grad():
        expected = theirs.double()(images().double()).logits
        torch.testing.assert_close(source.network.double()(images().double()), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("settings", "classes", "message"),
    [
        ({}, NAMES[:4], "which knows 5 classes, expected the 4 of the data"),
        (
            {},
            [*NAMES[:3], "class 4", "class 3"],
            "whose class 3 is class 3, expected class 4, as in the data; did you mean class 4",
        ),
        ({"image_size": 48}, NAMES, "which reads images of 32 x 32 pixels, expected 48 x 48, as model.image_size"),
    ],
)
def test_a_teacher_that_does_not_fit_is_one_message(folder, settings, classes, message):
    with pytest.raises(ConfigError) as error:
        open_teacher(student(**settings), Distillation(teacher=folder), classes)
    assert str(error.value).startswith(f"task.distill.teacher: got {folder}, ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_teacher_or_one_without_a_head_is_one_message(tmp_path):
    with pytest.raises(ConfigError, match=r"^task\.distill\.teacher: .*nowhere.*: no such file"):
        open_teacher(student(), Distillation(teacher=str(tmp_path / "nowhere")), NAMES)
    run = student(num_classes=None)
    save_model(str(tmp_path / "headless"), run, ViT(run.model))
    with pytest.raises(ConfigError, match="a network without a head, expected a classifier"):
        open_teacher(student(), Distillation(teacher=str(tmp_path / "headless")), NAMES)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task.distill.target=soft"], "task.distill.teacher: got nothing, expected the teacher"),
        (
            ["task.distill={teacher: t, target: sotf}"],
            "task.distill.target: got 'sotf', expected .*; did you mean soft",
        ),
        (["task.distill={teacher: t, temperature: 3}"], "temperature: got 3 with target hard, expected 1"),
        (["task.distill={teacher: t, weight: 0}"], "task.distill.weight: got 0"),
        (["task.distil.teacher=t"], "task.distil: unknown setting, .* did you mean distill"),
        (["model.distillation_token=true", "model.pool=mean"], "distillation_token true needs pool token"),
        (
            ["model={name: torchvision/resnet18, distillation_token: true}"],
            "torchvision/resnet18 has no distillation_token true",
        ),
        (
            ["task=masked", "model.num_classes=null", "model.distillation_token=true"],
            "model.distillation_token: got true, expected false: task masked has no teacher",
        ),
    ],
)
def test_bad_settings_are_one_message(overrides, message):
    with pytest.raises(ConfigError, match=message) as error:
        load_run(None, overrides)
    assert "\n" not in str(error.value)
