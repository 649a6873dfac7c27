"""`Run` as a value, its YAML and overrides, the messages for bad input, and the generated reference of settings."""

import itertools
import json
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from test_layers import ROOT

from pipelines import recipes
from vitray.config import Model, Run, load_run
from vitray.config.parsing import place_of
from vitray.config.reference import settings_page
from vitray.errors import ConfigError

BAD_OVERRIDES = [
    (
        "model.drop_pth=0.1",
        ["model.drop_pth: unknown setting", "expected one of name, image_size", "did you mean drop_path"],
    ),
    ("modle.pool=mean", ["modle: unknown setting, expected one of seed, model, task", "did you mean model"]),
    ("model.positions.resampel=timm", ["model.positions.resampel: unknown setting", "did you mean resample"]),
    ("model.pool=tokn", ["model.pool: got 'tokn', expected 'token', 'mean'", "did you mean token"]),
    ("model.head=mpl", ["model.head: got 'mpl', expected 'linear', 'mlp'; did you mean mlp"]),
    ("model.name=vit_q12x1_16", ["model.name: model name 'vit_q12x1_16': width 'q'"]),
    ("model.name=3", ["model.name: got 3, expected text"]),
    ("model.drop_path=much", ["model.drop_path: got 'much', expected a number"]),
    ("model.drop_path=1.0", ["model.drop_path: got 1.0, expected less than 1"]),
    ("model.drop_path=-1e-3", ["model.drop_path: got -0.001, expected greater than or equal to 0"]),
    ("model.layerscale=.nan", ["model.layerscale: got nan, expected a finite number"]),
    ("model.image_size=[224]", ["model.image_size: got [224], expected a whole number or a longer list"]),
    ("model.image_size=[1,2,3]", ["model.image_size: got [1, 2, 3], expected a whole number or a shorter list"]),
    ("model.image_size=true", ["model.image_size: got True, expected a whole number or a list"]),
    ("model.image_size=225", ["model: image_size 225 is not a multiple of the patch of vit_ti12x1_16, 16"]),
    ("seed=None", ["seed: got None, expected a whole number"]),
    ("seed=1.5", ["seed: got 1.5, expected a whole number"]),
    ("seed=-1", ["seed: got -1, expected greater than or equal to 0"]),
    ("seed.x=1", ["seed: got {'x': 1}, expected a whole number"]),
    ("model=3", ["model: got 3, expected settings as `key: value`"]),
    ("seed", ["override 'seed': expected setting=value"]),
    ("=1", ["override '=1': expected setting=value"]),
    ("seed=@", ["override 'seed=@': not YAML"]),
    ("model.execution=fused model.dropout=0.1", ["execution fused is not exact with dropout 0.1"]),
    ("model.class_token=false", ["pool token needs class_token: true"]),
    (
        "task.kind=finetune",
        [
            "task.weights: got nothing, expected a vitray model folder (a path, s3://, ",
            ") or another library's weights file",
        ],
    ),
    ("task=finetune", ["task.weights: got nothing, expected a vitray model folder"]),
    (
        "task.kind=finetun",
        ["'masked', 'lejepa', 'self_distillation', 'tokenizer'; did you mean finetune?"],
    ),
    (
        "task=finetune task.weights=a task.mode=atn",
        ["task.mode: got 'atn', expected 'full', 'attn'", "did you mean attn"],
    ),
    ("task=finetune task.weights=a task.also_train=norms", ["task.also_train: got 'norms', expected a list"]),
    (
        "task=finetune task.weights=a task.mode=attn task.also_train=[stam]",
        ["task.also_train: got 'stam'", "did you mean stem"],
    ),
    (
        "task=finetune task.weights=a task.also_train=[stem]",
        ["task: also_train names stem, which mode full trains anyway; expected no"],
    ),
    (
        "task=finetune task.weights=a task.mode=norm task.also_train=[stem,head]",
        ["task: also_train names head, which mode norm trains anyway; expected stem or class_token or distillation_to"],
    ),
    (
        "task=finetune task.weights=a task.mode=ffn task.first_branch=true",
        ["task: first_branch true is about mode attn alone; expected false in mode ffn"],
    ),
    (
        "task=finetune task.weights=a task.mode=attn task.lora.rank=4",
        ["task: lora.rank is about mode lora alone; expected the defaults in mode attn"],
    ),
    (
        "task=finetune task.weights=a task.levels=2",
        ["task: levels 2 is about mode last alone; expected 1 in mode full"],
    ),
    ("task=finetune task.weights=a task.mode=lora task.lora.rank=0", ["task.lora.rank: got 0, expected greater than"]),
    ("task=finetune task.weights=a task.mode=lora task.lora.matrices=[]", ["task.lora.matrices: got ", "longer list"]),
    (
        "task=finetune task.weights=a task.mode=lora task.lora.matrices=[q,upp]",
        ["task.lora.matrices: got 'upp', expected 'q', 'k', 'v', 'out', 'up' or 'down'; did you mean up"],
    ),
    (
        "task=finetune task.weights=a task.mode=lora task.lora.matrices=[v,q,v]",
        ["task.lora: matrices: got v more than once, expected each matrix once"],
    ),
    (
        "task=finetune task.weights=a task.mode=lora task.lora.rnak=4",
        ["task.lora.rnak: unknown setting, expected one of rank, alpha, matrices; did you mean rank"],
    ),
    ("task.kind=supervised task.mode=lora", ["task.mode: unknown setting, expected one of kind, labels, loss"]),
    ("task.kind=supervised task.lora.rank=4", ["task.lora: unknown setting, expected one of kind, labels, loss"]),
    ("model.adapters=0", ["model.adapters: got 0, expected"]),
    (
        "compute.activation_checkpointing=feedforwards",
        ["compute.activation_checkpointing: got 'feedforwards', expected 'none'", "did you mean feedforward"],
    ),
    (
        "compute.activation_checkpointing=1",
        ["compute.activation_checkpointing: got 1, expected 'none', 'feedforward' or 'blocks'"],
    ),
    ("optim.lr=!!bool~maybe", ["not YAML: 'maybe'"]),
    ("optim.lr=!!float~''", ["not YAML: "]),
    ("optim.lr=!!timestamp~x", ["got the tag 'tag:yaml.org,2002:timestamp', expected plain text, numbers, lists"]),
    ("optim={?~[a]~:~b}", ["expected a name of at most 200 characters before the colon"]),
    (f"seed={'[' * 3000}", ["expected at most 20 levels of lists and mappings"]),
    (f"seed={'[1]' * 70_000}", ["expected at most 200,000 characters"]),
    (f"seed{'.a' * 2000}=1", ["got a path of 4004 characters, expected the dotted path of a setting"]),
    ("data.url=''", ["data.url: got '', expected one line of text, at most 1000 characters"]),
    ('tracking.experiment="a\\nb"', ["tracking.experiment: got 'a\\nb', expected one line of text"]),
    ("compute.workers=1000000", ["compute.workers: got 1000000, expected a number from 1 to 999,999"]),
    (
        "optim.duration=2000000000~steps",
        ["optim.duration: got '2000000000 steps', expected at most 1,000,000,000 steps"],
    ),
    ("task.kind=tokenizer model.num_classes=null task.decoder_depth=2000", ["decoder_depth: got 2000 blocks of width"]),
    ("seed=1 seed=2", ["override 'seed=2': seed is given twice"]),
]


def words_of(overrides):
    """The overrides of a line; ~ stands for a space inside one."""
    return [word.replace("~", " ") for word in overrides.split(" ")]


@pytest.mark.parametrize(
    ("overrides", "message"), BAD_OVERRIDES, ids=[overrides[:80] for overrides, _ in BAD_OVERRIDES]
)
def test_a_bad_override_gives_one_message(overrides, message):
    with pytest.raises(ConfigError) as error:
        load_run(None, words_of(overrides))
    assert len(str(error.value).splitlines()) == 1
    assert len(str(error.value)) <= 1400
    for part in [*message, place_of(words_of(overrides)[-1])]:
        assert part in str(error.value)


LAUGHS = "".join(
    f"{name}: &{name} [{', '.join([f'*{below}'] * 9)}]\n" for below, name in itertools.pairwise("abcdefghi")
)
BAD_FILES = [
    ("model:\n  pool: tokn\n", "recipe.yaml:2: model.pool: got 'tokn'"),
    ("seed: 1\nmodel:\n  pool: mean\n  pool: token\n", "recipe.yaml:4: model.pool: given twice, first at "),
    ("- a\n- b\n", "recipe.yaml: got ['a', 'b'], expected settings"),
    ("model: {pool: [}\n", "recipe.yaml: not YAML"),
    ("model: &a\n  head: *a\n", "recipe.yaml: expected at most 20 levels of lists and mappings"),
    (
        "a: &a [1, 2, 3, 4, 5, 6, 7, 8, 9]\n" + LAUGHS,
        "recipe.yaml: expected at most 20,000 values, each use of an alias counted",
    ),
    (f"{'{a: ' * 30}1{'}' * 30}\n", "recipe.yaml: expected at most 20 levels of lists and mappings"),
    ("a: &a [*a]\n", "recipe.yaml: expected at most 20 levels of lists and mappings"),
    (f"a: [{'1, ' * 20_000}]\n", "recipe.yaml: expected at most 20,000 values"),
    (f"# {'a' * 200_000}\n", "recipe.yaml: expected at most 200,000 characters"),
    (f"{'a' * 201}: 1\n", "recipe.yaml:1: expected a name of at most 200 characters before the colon"),
    ("? *a\n: 1\n", "recipe.yaml: not YAML"),
    ("seed: 2026-01-01\n", "recipe.yaml:1: seed: got '2026-01-01', expected a whole number"),
    ("model: {drop_path: on}\n", "recipe.yaml:1: model.drop_path: got 'on', expected a number"),
]


@pytest.mark.parametrize(("text", "message"), BAD_FILES, ids=[message[:80] for _, message in BAD_FILES])
def test_an_error_in_a_recipe_names_the_line(tmp_path, text, message):
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(ConfigError) as error:
        load_run(tmp_path / "recipe.yaml")
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_a_missing_recipe_suggests_the_nearest(tmp_path):
    (tmp_path / "supervised.yaml").write_text("seed: 1\n")
    with pytest.raises(ConfigError, match=r"supervized.yaml: no such file; did you mean supervised.yaml"):
        load_run(tmp_path / "supervized.yaml")
    with pytest.raises(ConfigError, match="cannot be read as text"):
        load_run(tmp_path)
    (tmp_path / "image.yaml").write_bytes(b"\xff\xd8\xff\xe0")
    with pytest.raises(ConfigError, match="cannot be read as text"):
        load_run(tmp_path / "image.yaml")


def test_plain_scalars_follow_yaml_1_2(tmp_path):
    text = "model: {drop_path: 1e-1, layerscale: 1.e-4, norm_eps: 1E-6, image_size: 0224, num_classes: None}\n"
    (tmp_path / "recipe.yaml").write_text(text)
    model = load_run(tmp_path / "recipe.yaml", ["model.layerscale=2e-5"]).model
    assert (model.drop_path, model.layerscale, model.norm_eps) == (0.1, 2e-5, 1e-6)
    assert (model.image_size, model.num_classes) == (224, None)


def test_an_empty_recipe_is_the_defaults(tmp_path):
    (tmp_path / "recipe.yaml").write_text("# nothing yet\n")
    assert load_run(tmp_path / "recipe.yaml") == Run() == load_run()


def test_overrides_apply_to_the_recipe(tmp_path):
    (tmp_path / "recipe.yaml").write_text("model:\n  positions: {kind: learned, resample: timm}\n  head: mlp\n")
    run = load_run(tmp_path / "recipe.yaml", ["model.head.hidden=32", "model.image_size=[32,64]"])
    assert run.model.head.model_dump() == {"kind": "mlp", "hidden": 32}
    assert run.model.image_size == (32, 64)
    # The short form of the same kind discards nothing.
    assert run.replace({"model.positions": "learned"}) == run
    assert run.replace({"model.positions": "sincos2d"}) == run.replace({"model.positions.kind": "sincos2d"})
    # Another kind discards the other settings, in any order of the overrides.
    other = run.replace({"model.positions.frequencies": "big_vision", "model.positions.kind": "sincos2d"})
    assert other.model.positions.model_dump() == {"kind": "sincos2d", "where": "stem", "frequencies": "big_vision"}
    for overrides in (["optim.rule=sgd", "optim.rule.momentum=0.95"], ["optim.rule.momentum=0.95", "optim.rule=sgd"]):
        assert load_run(None, overrides).optim.rule.momentum == 0.95


def test_recompute_accepts_booleans_of_earlier_versions():
    expected = {"true": "blocks", "false": "none", "feedforward": "feedforward", "none": "none"}
    for text, value in expected.items():
        assert load_run(None, [f"compute.activation_checkpointing={text}"]).compute.activation_checkpointing == value


def test_a_fine_tuning_run_round_trips_through_yaml(tmp_path):
    overrides = [
        "task=finetune",
        "task.weights=models:/vit@champion",
        "task.mode=attn",
        "task.also_train=[norms, stem]",
    ]
    run = load_run(None, overrides)
    assert run.task.trained == {"attn", "positions", "head", "norms", "stem"}
    (tmp_path / "run.yaml").write_text(run.to_yaml())
    assert load_run(tmp_path / "run.yaml") == run == Run().replace(run.dotted())
    # Another kind discards the other settings.
    assert run.replace({"task.kind": "supervised"}) == Run()


def test_a_constructor_refuses_bad_settings_as_a_recipe_does():
    for build, message in (
        (lambda: Model(name="vit_zz"), "Model: name: model name 'vit_zz': width"),
        (lambda: Model(patch=3), "Model: patch: unknown setting, expected one of name, "),
        (lambda: Run(optim={"lr": "fast"}), "Run: optim.lr: got 'fast', expected a number"),
        (lambda: Run(model=Model(), task={"kind": "supervized"}), "did you mean supervised"),
    ):
        with pytest.raises(ConfigError) as refused:
            build()
        assert message in str(refused.value)


def test_a_recipe_has_a_name_and_overrides_may_be_values():
    run = load_run("demo", {"optim.lr": 1e-3, "model.image_size": (32, 64)})
    assert run == load_run(recipes.path_of("demo"), ["optim.lr=1e-3", "model.image_size=[32,64]"])
    with pytest.raises(ConfigError, match="no recipe 'demmo', and no file; did you mean demo"):
        load_run("demmo")
    with pytest.raises(ConfigError, match=r"overrides: optim\.lrr: unknown setting"):
        load_run("demo", {"optim.lrr": 1e-3})


def test_a_run_is_frozen_and_replaced():
    run = Run()
    with pytest.raises(ValidationError):
        run.seed = 3
    assert run.replace({"model.pool": "mean", "seed": 3}) == Run(seed=3, model=Model(pool="mean"))
    assert run == Run()
    with pytest.raises(ConfigError, match=r"model\.pol: unknown setting.*did you mean pool"):
        run.replace({"model.pol": "mean"})


def test_omitted_settings_stay_omitted_in_a_replaced_run():
    run = load_run(None, ["model.image_size=48", "data.normalize.mean=[0, 0, 0]"])
    new = run.replace({"optim.lr": 1e-3, "model.pool": "mean", "data.augment": {"erase": 0.1}})
    assert new.model.model_fields_set == {"image_size", "pool"}
    assert new.data.model_fields_set == {"normalize", "augment"}
    assert new.data.normalize.model_fields_set == {"mean"}
    assert new.data.augment.model_fields_set == {"erase"}
    assert new.replace({"seed": 3}).model.model_fields_set == {"image_size", "pool"}
    assert run.model.model_fields_set == {"image_size"}


@given(
    seed=st.integers(0, 2**31),
    drop_path=st.floats(0, 0.99),
    size=st.sampled_from([32, 224, (32, 64)]),
    positions=st.sampled_from(["learned", "learned2d", "sincos2d", "rope", "none"]),
    head=st.sampled_from(["linear", "mlp"]),
    classes=st.none() | st.integers(1, 10_000),
)
def test_a_run_round_trips_through_yaml_and_dotted_settings(
    tmp_path_factory, seed, drop_path, size, positions, head, classes
):
    model = Model(image_size=size, drop_path=drop_path, positions=positions, head=head, num_classes=classes)
    run = Run(seed=seed, model=model)
    path = tmp_path_factory.mktemp("run") / "run.yaml"
    path.write_text(run.to_yaml())
    assert load_run(path) == run
    assert Run().replace(run.dotted()) == run
    assert load_run(None, [f"{key}={json.dumps(value)}" for key, value in run.dotted().items()]) == run


def test_the_schema_describes_every_setting():
    done = subprocess.run([sys.executable, "-m", "vitray.config", "schema"], capture_output=True, text=True, check=True)
    schema = json.loads(done.stdout)
    for section in schema["$defs"].values():
        assert section["additionalProperties"] is False
    assert set(schema["$defs"]["Model"]["properties"]) == set(Model.model_fields)


def test_the_settings_page_is_current():
    """Renew it by `python -m vitray.config settings > docs/settings.md`."""
    page = (ROOT / "docs" / "settings.md").read_text()
    assert page == settings_page()
    # Every setting that is on by default, and those of other kinds.
    for path in {*Run().dotted(), "task.mode", "optim.ema.decay", "task.objective.tokenizer", "model.head.hidden"}:
        assert f"| `{path}` |" in page or path.endswith(".kind") or path == "optim.ema", path


def test_every_setting_has_a_description():
    rows = [row.split(" | ") for row in settings_page().splitlines() if row.startswith("| `")]
    assert len(rows) > 100
    assert [row[0] for row in rows if len(row[-1].removesuffix(" |").strip()) < 5] == []


def test_a_control_character_is_reported_as_bad_yaml():
    with pytest.raises(ConfigError, match=r"^override 'tracking.experiment=.*not YAML: .*special characters"):
        load_run(None, ["tracking.experiment=a\x07b"])


def test_a_recipe_extends_another_by_the_rule_of_overrides(tmp_path):
    (tmp_path / "base.yaml").write_text(
        "model: {name: vit_s12x1_16, drop_path: 0.05}\ndata: {mix: {mixup: 0.8, cutmix: 1.0}}\n"
        "optim: {lr: 4.0e-3, rule: {kind: sgd, momentum: 0.5}}\n"
    )
    (tmp_path / "large.yaml").write_text(
        "extends: base\nmodel: {name: vit_b12x1_16}\ndata: {mix: {mixup: 0.1}}\noptim: {rule: adamw}\n"
    )
    base, large = load_run(tmp_path / "base.yaml"), load_run(tmp_path / "large.yaml", ["model.drop_path=0.3"])
    overrides = ["model.name=vit_b12x1_16", "data.mix.mixup=0.1", "optim.rule=adamw", "model.drop_path=0.3"]
    assert large == load_run(tmp_path / "base.yaml", overrides)
    assert (large.optim.lr, large.data.mix.cutmix) == (base.optim.lr, 1.0)
    (tmp_path / "mine.yaml").write_text("extends: demo\nseed: 7\n")
    assert load_run(tmp_path / "mine.yaml") == load_run(recipes.path_of("demo"), ["seed=7"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extends: dmeo", "mine.yaml:1: extends: no recipe 'dmeo'; did you mean demo?"),
        ("extends: mine", "no recipe 'mine'"),
        ("extends: large", "mine.yaml:1: extends: large itself extends demo; extend that one"),
        ("extends: [demo]", "extends: got ['demo'], expected the name of a recipe, as in demo"),
        ("extends: ../demo.yaml", "expected the name of a recipe"),
        ("extends: demo\nmodel: {pol: mean}", "mine.yaml:2: model.pol: unknown setting"),
    ],
)
def test_a_recipe_that_cannot_be_extended_is_one_message(text, message, tmp_path):
    (tmp_path / "large.yaml").write_text("extends: demo\n")
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_run(tmp_path / "mine.yaml")
