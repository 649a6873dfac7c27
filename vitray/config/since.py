"""The section of CHANGELOG.md in which each setting came, and each kind of a section (`PATH=KIND`).

A key is a part of its heading. `vitray.config.reference` refuses a setting without an entry.
"""

_SECTIONS = {
    "0.1.0": """
checkpoint.every checkpoint.keep compute.compile compute.cpus compute.device compute.gpus
compute.local_batch compute.max_failures compute.precision compute.recompute compute.tf32 compute.workers
data.augment data.augment.crop data.augment.crop.crop_ratio data.augment.crop.interpolation
data.augment.crop.padding data.augment.crop.ratio data.augment.crop.scale data.augment.crop=centre
data.augment.crop=random_resized data.augment.crop=simple_random data.augment.erase data.augment.flip
data.augment.jitter data.augment.policy data.augment.policy.bins data.augment.policy.chance
data.augment.policy.fill data.augment.policy.increasing data.augment.policy.limit
data.augment.policy.magnitude data.augment.policy.ops data.augment.policy.std data.augment.policy=none
data.augment.policy=randaugment data.augment.policy=randaugment_torchvision
data.augment.policy=three_augment data.cache data.copies data.development data.eval_crop
data.eval_crop.crop_ratio data.eval_crop.interpolation data.max_corrupt data.mix data.mix.chance
data.mix.cutmix data.mix.mixup data.mix.switch data.normalise data.normalise.mean data.normalise.std
data.train data.url data.val evaluate.batch evaluate.every evaluate.where guard.max_rewinds guard.on_nan
guard.spike model.activation model.class_token model.drop_path model.drop_path_over_depth model.dropout
model.execution model.head model.head.hidden model.head.init model.head=linear model.head=mlp
model.image_size model.layerscale model.name model.norm_eps model.num_classes model.pool model.positions
model.positions.frequencies model.positions.resample model.positions=learned model.positions=none
model.positions=sincos2d optim.batch optim.clip optim.duration optim.ema optim.ema.decay optim.ema.warmup
optim.layer_decay optim.lr optim.rule optim.rule.betas optim.rule.eps optim.rule.momentum
optim.rule.nesterov optim.rule=adamw optim.rule=lamb optim.rule=sgd optim.schedule
optim.schedule.during_warmup optim.schedule.floor optim.schedule=constant optim.schedule=cosine
optim.schedule=linear optim.warmup optim.warmup_from optim.weight_decay seed task.allow_leak task.also
task.decoder_depth task.decoder_heads task.decoder_width task.delta task.first_branch task.levels task.loss
task.mask task.mask.aspect task.mask.kept task.mask.least task.mask.other task.mask.ratio task.mask=blocks
task.mask=random task.mode task.objective task.objective.decoder_depth task.objective.decoder_heads
task.objective.decoder_width task.objective.normalised task.objective.tokenizer task.objective=beit
task.objective=mae task.objective=mean_colour task.objective=pixels_l1 task.objective=pixels_l2
task.objective=small_patch task.smoothing task.weights task=finetune task=masked task=supervised
task=tokenizer tracking.every tracking.experiment tracking.register_as
""",
    "one Ray Data execution": """
evaluate.gpus model.heads
""",
    "evaluation, inspection": """
compute.channels_last data.augment.decode data.augment.on data.mix.per evaluate.figures evaluate.pictures
evaluate.probe_images evaluate.probes guard.knn_drop guard.least_rank guard.on_collapse
model.adapters model.attention model.batch_momentum model.bias model.distillation_token model.norm
model.patches model.positions.base model.positions.where model.positions=learned2d
model.positions=relative model.positions=rope model.qk_norm model.registers model.resnet_eps
model.stem_norm_eps task.cosub task.cosub.weight task.distill task.distill.target
task.distill.teacher task.distill.temperature task.distill.weight task.lora task.lora.alpha
task.lora.matrices task.lora.rank tracking.promote tracking.promote.alias tracking.promote.when
""",
}
SINCE = {name: section for section, names in _SECTIONS.items() for name in names.split()}
