"""The schemas of KubeRay's and Kueue's resources, to check manifests without a Kubernetes.

tests/crds.json.xz has those of KubeRay 1.7.0 (helm-chart/kuberay-operator/crds) and Kueue 0.19.2
(config/components/crd/bases), both under the Apache License 2.0, without their descriptions. To renew it:
`python tests/crds.py CRD.yaml ...`. Kubernetes also evaluates rules between fields (CEL), which this does not.
"""

import json
import lzma
import sys
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml

FILE = Path(__file__).with_name("crds.json.xz")
GROUPS = ("ray.io/v1", "kueue.x-k8s.io/v1beta2")
# The part of a RayCluster that has the rules of a NetworkPolicy, whose own schema is Kubernetes'.
INGRESS = ("ray.io/v1 RayCluster", "spec", "networkPolicy", "head", "ingressRules")


@cache
def schemas() -> dict[str, Any]:
    return json.loads(lzma.decompress(FILE.read_bytes()))


def check(resource: dict[str, Any]) -> None:
    """Raise a ValidationError for a field that its schema does not have, or a value of another type."""
    kind = f"{resource['apiVersion']} {resource['kind']}"
    if kind == "networking.k8s.io/v1 NetworkPolicy":
        kind, *path = INGRESS
        schema = schemas()[kind]
        for name in path:
            schema = schema["properties"][name]
        jsonschema.validate(resource["spec"]["ingress"], schema)
    else:
        jsonschema.validate(resource, schemas()[kind])


def closed(schema: Any) -> Any:
    """Return a schema without descriptions, which rejects unknown fields as `kubectl apply` does."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {name: closed(part) for name, part in schema.items() if name != "description" or isinstance(part, dict)}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        kept.setdefault("additionalProperties", bool(schema.get("x-kubernetes-preserve-unknown-fields")))
    return kept


def main(paths: list[str]) -> None:
    found = {}
    for path in paths:
        crd = yaml.safe_load(Path(path).read_text())["spec"]
        for version in crd["versions"]:
            if (group := f"{crd['group']}/{version['name']}") in GROUPS:
                found[f"{group} {crd['names']['kind']}"] = closed(version["schema"]["openAPIV3Schema"])
    FILE.write_bytes(lzma.compress(json.dumps(found, sort_keys=True).encode(), preset=9))


if __name__ == "__main__":
    main(sys.argv[1:])
