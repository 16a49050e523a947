"""What `stalloc mcp` answers: one sentence, and the JSON of a verb with its long lists cut.

Contract: what is cut is counted, under `left_out`, by its place in the JSON (`devices.0.by_site`).
"""

from collections.abc import Callable
from typing import Any

from stalloc.figures import human_bytes, plural

_ALLOCATORS = {"native": "PyTorch", "expandable": "expandable segments", "stalloc": "stalloc"}


def answer(verb: str, found: dict[str, Any], most: int) -> dict[str, Any]:
    """`sentence`, `result` and `left_out`; lists have `most` items at most."""
    left_out: dict[str, int] = {}
    result = _shortened(found, most, "", left_out)
    return {"sentence": SENTENCES[verb](found), "result": result, "left_out": left_out}


def _shortened(value: Any, most: int, place: str, left_out: dict[str, int]) -> Any:
    if isinstance(value, dict):
        return {key: _shortened(item, most, f"{place}.{key}".lstrip("."), left_out) for key, item in value.items()}
    if isinstance(value, list):
        if len(value) > most:
            left_out[place] = len(value) - most
        return [_shortened(item, most, f"{place}.{at}", left_out) for at, item in enumerate(value[:most])]
    return value


def _explained(found: dict[str, Any]) -> str:
    devices, errors = found["devices"], found["errors"]
    if not devices and not errors:
        return "Nothing could be explained: `not_explained` says why."
    if not devices:
        one = errors[0]
        return f"The error asks for {human_bytes(one['wanted_bytes'] or 0)}: {one['verdict']}."
    one = max(devices, key=lambda device: (device.get("verdict") is not None, device["reserved_bytes"]))
    figures = f"{human_bytes(one['allocated_bytes'])} allocated of {human_bytes(one['reserved_bytes'])} reserved"
    cause, size = max(one["causes"].items(), key=lambda item: item[1])
    gap = f"most of the rest is {cause.replace('_', ' ')}, {human_bytes(size)}"
    if one.get("verdict") is None:
        return f"Device {one['device']}: {figures}; {gap}."
    failed = f"{human_bytes(one['wanted_bytes'])} could not be allocated ({one['verdict']})"
    return f"Device {one['device']}: {failed} with {figures}; {gap}."


def _described(found: dict[str, Any]) -> str:
    one = max(found["devices"], key=lambda device: device["allocated_peak_bytes"])
    reserved = one["reserved_peak_bytes"]
    told = f", {human_bytes(reserved)} reserved" if reserved is not None else ""
    peak = human_bytes(one["allocated_peak_bytes"])
    return f"Device {one['device']}: {plural(one['requests'], 'request')}, at the peak {peak} allocated{told}."


def _held(found: dict[str, Any]) -> str:
    one = max(found["devices"], key=lambda device: device["allocated_bytes"])
    listed = one["by_site"] or one["by_class"] or one["by_size"]
    most = f"; most by {listed[0]['name']}, {human_bytes(listed[0]['held_bytes'])}" if listed else ""
    return f"Device {one['device']} ({one['at']}): {human_bytes(one['allocated_bytes'])} are allocated{most}."


def _simulated(found: dict[str, Any]) -> str:
    if "ranking" in found:
        if found["too_short"]:
            return "The history is too short to rank settings."
        return found["export"] or "No setting of PyTorch's allocator is better by a per cent."
    one = max(found["devices"], key=lambda device: device["recorded"]["allocated_peak_bytes"])
    fitting = [result for result in one["results"] if result["fits"]]
    if not fitting:
        return f"Device {one['device']}: no allocator that was tried completes."
    best = min(fitting, key=lambda result: result["peak_reserved_bytes"])
    name = " ".join(word for word in (best["allocator"], best["settings"]) if word)
    return f"Device {one['device']}: {name} reserves least, {human_bytes(best['peak_reserved_bytes'])}."


def _dry_run(found: dict[str, Any]) -> str:
    parts = []
    for key, name in _ALLOCATORS.items():
        one = found.get(key)
        if one is None:
            continue
        if "largest" in one:
            parts.append(f"{name} {one['largest'] if one['largest'] is not None else 'none'}")
        elif "gpu" in one:
            parts.append(f"{name} {one['gpu'] or 'none'}")
        else:
            fits = "fits" if one["fits"] else "does not fit"
            parts.append(f"{name} {fits} and needs {human_bytes(one['needed_bytes'])}")
    if "parameter" in found:
        return f"The largest {found['parameter']} on {found['gpu']}: {', '.join(parts)}."
    if found.get("gpu") is None:
        return f"The smallest card: {', '.join(parts)}."
    return f"On {found['gpu']} ({human_bytes(found['memory_bytes'])}): {', '.join(parts)}."


def _fitted(found: dict[str, Any]) -> str:
    budget = human_bytes(found["budget_bytes"])
    if found["best"] < 0:
        return found["sentence"] or f"Nothing that was tried fits {budget}."
    return f"The cheapest way that fits {budget} is {found['candidates'][found['best']]['what']}."


def _listed(found: dict[str, Any]) -> str:
    executed = sum(one["status"] == "executes" for one in found["systems"])
    return f"{len(found['systems'])} published systems, of which stalloc executes {executed}."


SENTENCES: dict[str, Callable[[dict[str, Any]], str]] = {
    "explain": _explained,
    "stats": _described,
    "top": _held,
    "simulate": _simulated,
    "dryrun": _dry_run,
    "fit": _fitted,
    "policies": _listed,
}
"""What a verb found, in one sentence."""
