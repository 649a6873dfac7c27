"""What a server shows to people and to generators of clients: a page with its tasks, and its OpenAPI description."""

from typing import Any

# Without anything from another host. Texts of the server are set as text, so that a class name is never markup.
_HEAD = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>vitray serve</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 44rem; margin: 2rem auto; padding: 0 1rem; color: #1d2733 }
fieldset { display: flex; flex-wrap: wrap; gap: .7rem; align-items: end }
fieldset { border: 1px solid #c8d0da; border-radius: 6px }
label { display: grid; font-size: .85rem; color: #4a5766 } img { max-height: 12rem; border-radius: 6px }
input, select, button { font: inherit; padding: .25rem .5rem }
meter { width: 8rem } td { padding: .15rem .8rem .15rem 0 }
#message { color: #a3261b } a { color: #1f5fa8 }
@media (prefers-color-scheme: dark) { body { background: #14191f; color: #dbe3ec } label { color: #9fb0c2 } }
</style>
<h1>vitray serve</h1>
"""
PAGE = (
    _HEAD
    + """<form><fieldset>
<label>task <select id="task"></select></label>
<label>image <input id="image" type="file" accept="image/*" required></label>
<label>token, if the server has one <input id="token" type="password" autocomplete="off"></label>
<button>predict</button>
</fieldset></form>
<p id="message" role="alert"></p><img id="shown" alt="" hidden><table id="answer"></table>
<p><a href="docs">The requests</a>, and their description for generators of clients,
<a href="openapi.json">openapi.json</a>.</p>
<script>
const at = name => document.getElementById(name)
const headers = () => at("token").value ? {Authorization: "Bearer " + at("token").value} : {}
async function ask(path, request) {
  const response = await fetch(path, {...request, headers: headers()}), body = await response.json()
  if (!response.ok) throw new Error(body.error)
  return body
}
async function list() {
  try {
    at("task").replaceChildren(...(await ask("v1/tasks")).tasks.map(each => new Option(each.task)))
    at("message").textContent = ""
  } catch (error) { at("message").textContent = error.message }
}
at("token").onchange = list
document.forms[0].onsubmit = async event => {
  event.preventDefault()
  const file = at("image").files[0]
  at("answer").replaceChildren()
  at("shown").src = URL.createObjectURL(file); at("shown").hidden = false
  try {
    const path = "v1/predict?task=" + encodeURIComponent(at("task").value)
    const {predictions: [{top}]} = await ask(path, {method: "POST", body: file})
    at("message").textContent = ""
    for (const each of top) {
      const row = at("answer").insertRow(), meter = document.createElement("meter")
      row.insertCell().textContent = each.class
      meter.value = each.probability
      row.insertCell().append(meter)
      row.insertCell().textContent = (100 * each.probability).toFixed(1) + " %"
    }
  } catch (error) { at("message").textContent = error.message }
}
list()
</script></html>
"""
)
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline';"
    " connect-src 'self'; img-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
}

_ERROR = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
_CLASS = {
    "type": "object",
    "required": ["label", "class", "probability"],
    "properties": {"label": {"type": "integer"}, "class": {"type": "string"}, "probability": {"type": "number"}},
}
# Of a network of several labels an image.
_SEVERAL = {
    "labels": {"type": "array", "items": {"type": "string"}},
    "scores": {"type": "array", "items": {"type": "number"}},
}
_PREDICTIONS = {
    "type": "object",
    "required": ["task", "model", "predictions"],
    "properties": {
        "task": {"type": "string"},
        "model": {"type": "string", "description": "The address of the network that answered."},
        "predictions": {
            "type": "array",
            "items": {"allOf": [_CLASS, {"properties": {"top": {"type": "array", "items": _CLASS}, **_SEVERAL}}]},
        },
    },
}
_JSON = {
    "type": "object",
    "properties": {
        "image": {"type": "string", "format": "byte"},
        "images": {"type": "array", "items": {"type": "string", "format": "byte"}},
        "task": {"type": "string"},
        "top_k": {"type": "integer", "minimum": 1},
    },
}


def _answers(text: str, content: dict[str, object]) -> dict[str, object]:
    errors = {"description": "One message.", "content": {"application/json": {"schema": _ERROR}}}
    return {"200": {"description": text, "content": content}, "default": errors}


def _json(schema: dict[str, object]) -> dict[str, object]:
    return {"application/json": {"schema": schema}}


OPENAPI: dict[str, Any] = {
    "openapi": "3.1.0",
    "info": {"title": "vitray serve", "version": "1", "description": "A network and deltas of it, as tasks."},
    "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    "security": [{}, {"token": []}],
    "paths": {
        "/v1/predict": {
            "post": {
                "summary": "The most probable classes of each image",
                "parameters": [
                    {"name": "task", "in": "query", "schema": {"type": "string"}},
                    {"name": "top_k", "in": "query", "schema": {"type": "integer", "minimum": 1, "default": 5}},
                ],
                "requestBody": {
                    "required": True,
                    "content": {
                        "image/*": {"schema": {"type": "string", "format": "binary"}},
                        "multipart/form-data": {"schema": {"type": "object"}},
                        "application/json": {"schema": _JSON},
                    },
                },
                "responses": _answers("An answer for each image.", _json(_PREDICTIONS)),
            }
        },
        "/v1/tasks": {
            "get": {"summary": "Each task with its network", "responses": _answers("Tasks.", _json({"type": "object"}))}
        },
        "/healthz": {
            "get": {
                "summary": "Whether a replica answers",
                "security": [{}],
                "responses": _answers("It does, or all are busy.", _json({"type": "object"})),
            }
        },
        "/metrics": {"get": {"summary": "Counts for Prometheus", "responses": _answers("Text.", {"text/plain": {}})}},
    },
}


def _request(path: str, method: str, request: dict[str, Any]) -> str:
    """Return a request as a row of the page that describes them."""
    parameters = [each["name"] for each in request.get("parameters", ())]
    body = ", ".join(request["requestBody"]["content"]) if "requestBody" in request else ""
    query = f"?{'&amp;'.join(f'{name}=' for name in parameters)}" if parameters else ""
    return f"<tr><td><code>{method.upper()} {path}{query}</code><td>{request['summary']}<td>{body}</tr>"


DOCS = "\n".join(
    [
        f"{_HEAD}<p>{OPENAPI['info']['description']} A request gives the token, if the server has one, as",
        "<code>Authorization: Bearer TOKEN</code>. An error is JSON with one message.</p>",
        "<table><tr><th>request<th>answer<th>body</tr>",
        *(_request(path, *each) for path, methods in OPENAPI["paths"].items() for each in methods.items()),
        '</table><p><a href="openapi.json">openapi.json</a> has every field; <a href=".">try one</a>.</p></html>',
    ]
)
