"""vitray evaluate MODEL... DATA: scores with intervals, calibration and comparisons, as a page, JSON and CSV."""

from typing import Any

from pipelines import recipes
from pipelines.__main__ import run_verb
from vitray.evaluation.options import read_options
from vitray.system import storage


def main(args: list[str]) -> dict[str, Any]:
    options = read_options(args)
    if options.training_probes:  # imported late, as all below, because torch takes a second
        from vitray.runs.training_probes import probe_checkpoints

        return {"checkpoints": probe_checkpoints(options.words, options.probes)}
    models = [word for word in options.words if "=" not in word] if options.vtab else options.words[:-1]
    storage.check_there(*models)
    if options.vtab:
        from vitray.evaluation.vtab.evaluate import VtabRequest, evaluate_vtab
        from vitray.evaluation.vtab.page import vtab_text

        vtab = VtabRequest(options.words, options.vtab, recipes.path_of("finetune_sgd_imagenet"), options.split)
        vtab = vtab._replace(train_split=options.train_split, out=options.out, seeds=options.seeds)
        scores, page = evaluate_vtab(vtab._replace(workers=options.workers, max_corrupt=options.max_corrupt))
        print(f"{vtab_text(scores)}\n\n{page}")
        return scores.flat() | {"page": page}
    from vitray.evaluation import evaluate, texts

    *models, data = options.words
    request = evaluate.Request(models, data, options.split, options.probes, options.train_split)
    request = request._replace(out=options.out, workers=options.workers, max_corrupt=options.max_corrupt)
    request = request._replace(corrupt=options.corrupt, imagenet_c=options.imagenet_c, baseline=options.baseline)
    request = request._replace(labels=options.labels, train_shares=options.train_shares)
    evaluation, page = evaluate.evaluate(request)
    print(f"{texts.scores_text(evaluation)}\n\n{page}")
    return evaluation.flat() | {"page": page}


if __name__ == "__main__":
    raise SystemExit(run_verb(main))
