"""A commit of an optimizer's whole state: what is on disk, what is elsewhere, and the options of its groups.

Contract: the folder has either the commit before or this one, each whole; values are those of the optimizer to the last
bit, as `load_state_dict` takes them.
"""

import json
from typing import Any

import torch

from stalloc.errors import BadInputError
from stalloc.techniques.disk_store import DiskStore, Region
from stalloc.techniques.host_store import dense_strides
from stalloc.techniques.paged_optimizer import PagedOptimizer, paged_optimizer
from stalloc.techniques.state_pager import is_large
from stalloc.techniques.transfers import Transfers


def commit_state(optimizer: Any, label: int) -> None:
    """See `stalloc.commit`."""
    paged = paged_optimizer(optimizer)
    if paged is None or paged.disk is None:
        raise BadInputError('this optimizer keeps no state on a disk: page it with disk="FOLDER:SIZE".')
    pager, disk = paged.pager, paged.disk
    with pager.stepping(optimizer):
        pager.settle()
        pager.put_down()
        state: dict[int, dict[str, Any]] = {}
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        for number, parameter in enumerate(parameters):
            values = optimizer.state.get(parameter)
            if values:
                state[number] = {name: _told(paged, disk, parameter, name, value) for name, value in values.items()}
        disk.settle()
        told = {number: {name: _of_region(one) for name, one in values.items()} for number, values in state.items()}
    groups, count = [], 0
    for group in optimizer.param_groups:
        rest = {name: value for name, value in group.items() if name != "params"}
        groups.append({**rest, "params": list(range(count, count + len(group["params"])))})
        count += len(group["params"])
    manifest = {"label": label, "chunk_bytes": disk.chunk_bytes, "param_groups": groups, "state": told}
    try:
        json.dumps(manifest)
    except TypeError as error:
        raise BadInputError(
            f"an option of {type(optimizer).__name__} cannot be committed ({error}): give it as a number or a string."
        ) from error
    disk.commit(manifest)


def _told(paged: PagedOptimizer, disk: DiskStore, parameter: Any, name: str, value: Any) -> Any:
    """What a manifest tells of a value; for a large tensor, its facts and the region that it is written to."""
    if not isinstance(value, torch.Tensor):
        return {"value": value}
    kind = str(value.dtype).removeprefix("torch.")
    if not is_large(value):
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return {"dtype": kind, "shape": list(value.shape), "data": bytes(data.tolist()).hex()}
    region = paged.pager.region_of(parameter, name, value)
    if region is None:  # it lies elsewhere
        regions = paged.committed_regions.setdefault(parameter, {})
        if name not in regions or regions[name].size_bytes != value.nbytes:
            found = disk.take([value.nbytes])
            if found is None:
                raise BadInputError("a commit needs more room on the disk than is allowed: nothing was committed.")
            regions[name] = found[0]
        region = regions[name]
        disk.write([(value, region)], Transfers(value.device))()
    return {"dtype": kind, "shape": list(value.shape), "stride": list(dense_strides(value))}, region


def _of_region(told: Any) -> dict[str, Any]:
    """What a manifest tells of a value, with the place of its region on the disk, once that is written."""
    if isinstance(told, dict):
        return told
    facts, region = told
    assert isinstance(region, Region)
    place = region.places[region.current]
    return {**facts, "offset": place, "size_bytes": region.size_bytes, "sums": region.sums}
