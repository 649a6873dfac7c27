"""The texts of docs/results.md, and the sweeps that experiments/cifar10_results.py reads for them."""

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Thing(NamedTuple):
    """A section of the page: a sweep and what it compares."""

    space: str
    title: str
    recipe: str
    overrides: Sequence[str]
    """Of all trials."""
    rate_overrides: Sequence[str]
    """Of the trials that choose the rates."""
    label: str
    """A cell's label, of its drawn values."""
    references: Callable[[str], Sequence[str]] | None
    """The cells that a cell is compared with, by label; None compares each with each, or with the control."""
    text: str
    paper: str
    control: str | None = None
    """The cell that all others are compared with."""
    shares_networks: bool = False
    """Whether runs of a seed start from the same network."""

    @property
    def picture(self) -> str:
        """The file of its learning curves below docs/images."""
        return f"{self.space}.png"


STEM_SETTINGS = ("model.image_size=64", "data.augment.crop.padding=8")
SHORT = "optim.duration=2.5 epochs"
DEVELOPMENT = "data.holdout=0.1"


def stem_references(label: str) -> list[str]:
    """Return the linear stem of the same route, for conv also both hMLP, and the same stem with labels alone."""
    stem, route = label.split(", ")
    stems = {"linear": [], "conv": ["linear", "hmlp_bn", "hmlp_ln"]}.get(stem, ["linear"])
    references = [f"{other}, {route}" for other in stems]
    return references + ([f"{stem}, supervised"] if route != "supervised" else [])


THINGS = (
    Thing(
        space="cifar10_depth_x_branches",
        title="Thing 1: depth and branches",
        recipe="cifar10_supervised",
        overrides=(),
        rate_overrides=(SHORT, DEVELOPMENT),
        label="{depth}x{branches}",
        references=None,
        text="Twelve blocks of width 64, patches of 8, in sequence or in parallel branches: the same parameters and"
        " operations. 4 epochs with labels. Learning rates are chosen in runs of 2.5 epochs. The times of 12x1 and of"
        " one 6x2 include other work on the machine, and two of these trials were stopped for a while.",
        paper="The paper, on ImageNet: at equal parameters two branches are best, and the gain grows with the number of"
        ' blocks ("Three things", Figures 1 and 3). Its networks are wider and at least twice as deep; its numbers are'
        " not mixed with ours.",
    ),
    Thing(
        space="cifar10_finetune_mode",
        title="Thing 2: fine-tuning of parts",
        recipe="cifar10_finetune",
        overrides=(),
        rate_overrides=(DEVELOPMENT,),
        label="{mode}",
        references=None,
        control="full",
        shares_networks=True,
        text="A 12x1 network learns airplane, automobile, bird, cat and deer for 4 epochs at 32 px. Then it is"
        " fine-tuned to dog, frog, horse, ship and truck for 2 epochs at 48 px, where all or some of its parts are"
        " trained. Each seed has a network of its own, from which all cells start: its effect is taken out of the"
        " differences. MB is the model folder: a delta for all modes but full.",
        paper='The paper, on ImageNet from 224 to 384 px: attention equals all weights, feed-forwards are below ("Three'
        ' things", Table 5); on small datasets attention is as good or better (Table 6).',
    ),
    Thing(
        space="cifar10_stems",
        title="Thing 3: stems and masked pre-training",
        recipe="cifar10_supervised",
        overrides=STEM_SETTINGS,
        rate_overrides=(*STEM_SETTINGS, SHORT, DEVELOPMENT),
        label="{stem}, {route}",
        references=stem_references,
        text="A 6x1 network with one of four stems: 4 epochs with labels, alone or after 5 epochs without labels by"
        " BeiT or as a masked autoencoder (MAE). Photographs of 32 px are shown at 64 px with patches of 16, because"
        " the conv stem exists for patches of 16 only. Pre-training stages use their recipes' learning rates."
        " Pre-trained networks see more images in all; what is compared at equal cost are stems within a route."
        " conv is pre-trained with `task.allow_leak=true`: its overlapping kernels see hidden pixels. All BeiT stages"
        " share one tokenizer, so no interval has its spread. The memory of hmlp_bn and conv includes a memory leak,"
        " except for conv, mae (experiments/LOG.md). It killed trials of conv, which resumed: their times are rough.",
        paper="The paper, on ImageNet: with labels alone, hMLP and conv are 0.3 points above a linear stem. After BeiT"
        ' hMLP keeps its gain, and conv is equal to the linear stem ("Three things", Table 7).',
    ),
)


def epochs(number: int, parts: int = 1) -> tuple[str, ...]:
    """Return the overrides of a run of so many epochs, which is evaluated and saved after each of some parts."""
    return (f"optim.duration={number} epochs", *(f"{each}.every={number // parts} epochs" for each in EACH_PART))


EACH_PART = ("evaluate", "checkpoint")
PARTS = ("model.image_size=32", "data.augment.crop.padding=4", "optim.duration=4 epochs")
COMING = (
    Thing(
        space="cifar10_branches",
        title="Thing 1: depth and branches",
        recipe="cifar10_speedrun",
        overrides=epochs(14, 2),
        rate_overrides=(*epochs(5), DEVELOPMENT),
        label="{depth}x{branches}",
        references=None,
        text="",
        paper="",
    ),
    Thing(
        space="cifar10_parts",
        title="Thing 2: fine-tuning of parts",
        recipe="cifar10_finetune",
        overrides=PARTS,
        rate_overrides=(*PARTS, DEVELOPMENT),
        label="{mode}",
        references=None,
        text="",
        paper="",
        control="full",
        shares_networks=True,
    ),
    Thing(
        space="cifar10_stem_routes",
        title="Thing 3: stems and masked pre-training",
        recipe="cifar10_speedrun",
        overrides=epochs(14, 2),
        rate_overrides=(*epochs(5), DEVELOPMENT),
        label="{stem}, {route}",
        references=None,
        text="",
        paper="",
    ),
)
"""The same things where networks have learned: recorded as they are trained, and not on the page before all are."""
SWEEPS = (
    *((thing.space, thing.recipe, thing.overrides) for thing in (*THINGS, *COMING)),
    *((f"{thing.space}_rates", thing.recipe, thing.rate_overrides) for thing in (*THINGS, *COMING)),
    ("cifar10_ideas", "cifar10_speedrun", (DEVELOPMENT,)),
    ("cifar10_long_ideas", "cifar10_speedrun", (*epochs(30, 6), DEVELOPMENT)),
    ("cifar10_views", "cifar10_lejepa", ()),
    ("cifar10_views_tuned", "cifar10_speedrun", ()),
)
"""The sweeps whose trials are recorded: space, recipe and overrides."""

COMMANDS = "Each trains the first seed of a cell. Those with weights in `sweeps/` need the stages of their sweep there."
HOURS = "<!-- not run: trains for hours -->\n```"
"""The beginning of a block."""

HEAD = """\
<!-- Generated by `python experiments/cifar10_results.py`: edit experiments/cifar10_texts.py. -->
# Results on CIFAR-10

The three things of "Three things everyone should know about Vision Transformers" on 60,000 photographs of 32 px, with a
command for every number that two cores repeat. The schedules are short and the networks small: a
comparison, far from the best accuracy."""

METHOD = """\
- A score is top-1 of the last step's weights on the test images: 10,000, or 5,000 for half of the classes. No
  setting is chosen on them. The rate of each cell is the best of three to five on a tenth of train, by one seed.
- A mean has Student's 95 % interval over seeds, which set the initial weights, the order of images and the
  augmentation. Intervals hold for these test images and these learning rates.
- Differences are tested under one variance of the seeds of all cells of a thing (Bartlett's test of equal variances: p
  0.33, 0.80 and 0.90). Seeds are paired only where cells start from the same network: scores of the same seed are else
  hardly alike, and a pairing by chance decides. Intervals and p are Tukey's for all pairs of cells, or Dunnett's for
  those with one control, and hold for all of them together.
- "not significant" means that the interval contains zero. It does not mean equal.
- wall is the median time of a trial from its last start to its end, two at a time on two cores; device, that of its
  steps. Some trials ran beside other work or were resumed (the log), so times show what a trial cost, not which network
  is faster; `vitray bench branches` measures that.

```
vitray shard cifar-10-binary.tar.gz data/cifar10
vitray shard cifar-10-binary.tar.gz data/cifar10_first "classes=[airplane,automobile,bird,cat,deer]"
vitray shard cifar-10-binary.tar.gz data/cifar10_second "classes=[dog,frog,horse,ship,truck]"
```

On two cores two trials run at a time if Ray counts four CPUs: `ray start --head --num-cpus=4`, then each command with
`RAY_ADDRESS=127.0.0.1:6379` before it and `compute.cpus=0.45` after its settings. Without that the same trials run one
by one, with two threads each.

The same command continues an interrupted sweep. `python experiments/cifar10_results.py sweeps` reads the records
and writes this page; without `sweeps`, it writes it from `cifar10_results.json`, which has every number of a trial."""

IN_A_MINUTE = """\
- **Parallel branches hold, and seem to gain.** Twelve blocks as 6x2, 4x3 and 3x4 are 1.00, 1.23 and 1.26 points above
  12x1. Part of it may be the rates: that of 12x1 was chosen by 46.37 % against 46.15 % of one seed, and at equal rates
  up to 0.001 the others are at most 0.7 points above it there.
- **Attention alone comes close to all weights**, with 0.81 instead of 2.46 MB: -0.59 points (-1.37 to +0.19), not
  significant. Unlike in the paper, feed-forwards alone are best: +2.04.
- **After BeiT, hMLP keeps most of its lead over a linear stem, conv half.** hmlp_bn has +6.58 of +8.09 points, which is
  no significant change, hmlp_ln +6.05 of +10.02, conv +8.42 of +16.62. In the paper hMLP keeps all and conv nothing.
  BeiT itself gives conv -0.13 (-2.02 to +1.75). The order of the paper after pre-training, hMLP above conv, is not
  reproduced: conv stays above both by 1.84 (bn, not significant) and 2.37 points (ln).
- **Not tested**: anything larger, longer or on a GPU; [a list](#what-is-not-tested) is below.

Of each thing, all pairs that are compared:"""

LABELS = """\
The features of networks with a linear stem, frozen, and a classifier that learns from a share of the labels of train:
logistic regression, or the ViT paper's few-shot least squares. Mean and standard deviation over the networks of three
seeds, in percent of test; the images of few-shot scores are the same three draws for all networks, and other draws
would differ by 1 to 5 points. `supervised` has seen all labels in training, the others none.

<!-- not run: hours of training come before it -->
```
vitray evaluate sweeps/cifar10_stems/"vit_u6x1_16 route=supervised"*/model \\
    sweeps/cifar10_stems/before/*/*=linear,*/model data/cifar10 --split test \\
    --probes linear few_shot --train-shares 0.05 0.1 0.5 --out sweeps/labels
```"""

ROUTES = {
    "none": ("none: random weights, pooled stem", "random"),
    "none_linear": ("none: random weights, linear stem", "random_linear"),
    "lejepa": ("LeJEPA", "lejepa"),
    "dino": ("DINO and KoLeo", "dino"),
    "mae": ("MAE, linear stem", "mae"),
    "beit": ("BeiT, linear stem", "beit"),
}
"""{case of cifar10_views: (its name, case of cifar10_views_tuned)}"""
VIEWS = """\
The network of cifar10_speedrun learns from the 50,000 photographs without labels: from views (LeJEPA, DINO) or from
masks (MAE, BeiT), each for about as long. Its frozen features are then read by a nearest-neighbor probe (20), by
logistic regression and by least squares of 10 labels a class; and the whole network is trained on with all labels for
six epochs. Mean and standard deviation over seeds, in percent of test. Masked networks have a linear stem, as pooled
convolutions would show them hidden pixels: compare each with random weights of its own stem.

<!-- not run: trains for hours -->
```
vitray train cifar10_tokenizer --here model.name=vit_u4x1_4 model.image_size=32 data.cache=none \\
    data.augment.crop.padding=4 --name codes
vitray sweep cifar10_lejepa cifar10_views --here --name cifar10_views
vitray evaluate sweeps/cifar10_views/*/model data/cifar10 --split test --probes knn linear few_shot --out sweeps/views
vitray sweep cifar10_speedrun cifar10_views_tuned --here --name cifar10_views_tuned
```"""

LABEL_CURVES = """\
Means of the linear probes over the seeds of the table, with Student's 95 % interval.

Twenty times the labels give a linear probe 2.1 points on supervised features, and 4.4 to 4.7 on masked ones, which stay
7 to 10 points below. Yet fine-tuned with labels these masked networks end 6 to 8 points above the supervised one (thing
3): a linear probe did not predict the order after fine-tuning. Part of the gain may be the longer training, which is
not tested."""

ATTENTION = """\
Eight test photographs beside the attention rollout of `conv, mae` (seed 0), with the predicted classes: two are
wrong, a bird called a deer and a frog called a bird. `vitray inspect MODEL data/cifar10 --split test --images 8
--figures rollout` draws them, where MODEL is `sweeps/cifar10_stems/"vit_u6x1_16_conv route=mae seed=0"/model`.

![Attention rollout over eight photographs](images/cifar10_rollout.png)

The most attended of 16 patches has 1.7 to 2.9 times the mean. Over the eight, the top row and the left column get 0.5
to 0.7 times the mean and the lower middle 1.3 to 1.9. The objects are in the middle, so a bias to the middle would look
the same, and 4 x 4 patches are too coarse to follow an outline. The maps of
[inspection](inspection.md#two-small-networks) are of 8 x 8."""

NOT_TESTED = """\
Other datasets, wider networks, patches of 4, longer schedules, GPUs, and the corrections that a long search of
settings would need. Three to five learning rates are tried, one weight decay and one augmentation. Cells that are best
at an end of their rates may do better beyond it."""
