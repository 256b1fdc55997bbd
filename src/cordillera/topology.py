"""A cluster as a tree of domains: devices in hosts, hosts in racks, up to buildings and regions.

The planner, table placement, hierarchical collectives and link emulation read the same description (TOML). Every shared
link is a resource with its own capacity, never a bandwidth for each device: below an oversubscribed uplink, a few
devices that send keep their full rate, and many share it.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import statistics
from bisect import bisect_right
from collections.abc import Mapping
from functools import cached_property, partial
from importlib import resources
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from cordillera.errors import PlanError, printable
from cordillera.files import parse_toml, read_text
from cordillera.mistakes import explain, known_keys, text_of

SECONDS_PER_KM = 5e-6  # light in glass: 1.468 times as long as in a vacuum

# Limits that keep costs and results finite: memory and time grow with counts; quotients of extreme rates overflow.
MOST_DEVICES = 1 << 20
_MOST_BYTES = 512 << 10  # largest file
_MOST_LISTED, _MOST_EXPLAINED = 20, 1_000  # most mistakes that an error lists, and counts


def _number(value: object) -> object:
    if isinstance(value, bool | str):  # pydantic would convert true to 1 and "8" to 8
        raise ValueError("must be a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("must be a finite number")
    return value


def _words(value: str) -> str:
    if printable(value, lines=True) != value:
        raise ValueError("control characters cannot be shown")
    return value


Numeric = BeforeValidator(_number)
Positive = Annotated[float, Numeric, Field(ge=1e-6, le=1e24, allow_inf_nan=False)]
NotNegative = Annotated[float, Numeric, Field(ge=0, le=1e12, allow_inf_nan=False)]
Words = Annotated[str, AfterValidator(_words), Field(max_length=10_000)]
Label = Annotated[str, AfterValidator(_words), Field(max_length=200), text_of(r"[^\n\t]*", "one line without tabs")]

Count = Annotated[int, Numeric, Field(ge=1, le=MOST_DEVICES)]

AnyModel = TypeVar("AnyModel", bound=BaseModel)


class Device(BaseModel):
    """An accelerator.

    Attributes:
        name: Name given by the maker.
        matrix_flops_per_s: Dense peak of its matrix engine in the training precision.
        memory_bytes: Bytes of the device's memory.
        memory_bytes_per_s: Bandwidth of the memory, bytes/s.
        nic_bytes_per_s: Bandwidth of the device's share of the host's network cards in each direction, bytes/s.
        processors: Number of streaming multiprocessors; kernels that move data take some from those that compute.
        fp8_flops_per_s: Dense peak of its matrix engine with factors in FP8; None if it has none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Label
    matrix_flops_per_s: Positive
    memory_bytes: Positive
    memory_bytes_per_s: Positive
    nic_bytes_per_s: Positive
    processors: Count = 132
    fp8_flops_per_s: Positive | None = None


class Level(BaseModel):
    """One kind of domain: its members and the links between them.

    Attributes:
        name: Name such as host, rack, zone, building or region.
        members: Number of domains of the level below (devices in the first level) in one domain; a list with one number
            for each domain if they differ.
        latency_s: One-way latency between devices in different members of a domain, seconds.
        distance_km: Length of fibre between members; adds 5 microseconds per kilometre to the latency.
        bytes_per_s: Rate of each member's link into the domain in each direction, bytes/s. In the first level this is a
            device's own port (NVLink). In other levels None means the rate of the network cards below divided by
            ``oversubscription``.
        oversubscription: Rate of the network cards below a member divided by the rate of its link; 1 where
            ``bytes_per_s`` is stated.
        planes: Number of parallel networks that the links consist of.
        planes_lost: Number of planes that are down.
        loss_rate: Loss rate of packets on a link; 0 in the first level.
        spraying: Whether packets of one connection can be spread over all planes; otherwise connections are hashed.
            This and the next two have no effect in the first level.
        selective_repeat: Whether a lost packet is sent again alone; otherwise with all that followed it.
        zero_copy: Whether network cards read and write tensors directly; otherwise kernels copy them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[
        str,
        Field(max_length=100),
        text_of("[a-z][a-z0-9_]*", "small letters, digits and underscores that begin with a letter"),
    ]
    members: Count | Annotated[tuple[Count, ...], Field(fail_fast=True)]
    latency_s: NotNegative
    distance_km: NotNegative = 0.0
    bytes_per_s: Positive | None = None
    oversubscription: Annotated[float, Numeric, Field(ge=1, le=1e12, allow_inf_nan=False)] = 1.0
    planes: Annotated[int, Numeric, Field(ge=1, le=4096)] = 1
    planes_lost: Annotated[int, Numeric, Field(ge=0)] = 0
    loss_rate: Annotated[float, Numeric, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.0
    spraying: bool = True
    selective_repeat: bool = True
    zero_copy: bool = True

    @model_validator(mode="after")
    def _has_a_way(self) -> Level:
        if self.planes_lost >= self.planes:
            raise ValueError(
                f"{self.planes_lost} of {self.planes} planes lost leaves no way between members; "
                f"{self.planes - 1} can be lost at most"
            )
        return self

    @model_validator(mode="after")
    def _has_one_rate(self) -> Level:
        if self.bytes_per_s is not None and self.oversubscription != 1:
            raise ValueError(
                f"bytes_per_s and oversubscription = {self.oversubscription:g} are two rates of one link; state one"
            )
        return self

    @property
    def latency(self) -> float:
        """One-way latency in seconds, including the propagation delay."""
        return self.latency_s + SECONDS_PER_KM * self.distance_km


class Link(BaseModel):
    """A link that differs from the others of its level.

    Attributes:
        level: Name of the level whose domain the link leads into.
        member: Domain of the level below that the link leads from, counted over the whole cluster.
        bytes_per_s: Rate in each direction, bytes/s.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    level: Label
    member: Annotated[int, Numeric, Field(ge=0)]
    bytes_per_s: Positive


class DeviceGroup(BaseModel):
    """A domain whose devices are of another kind than the cluster's, such as an older generation.

    Attributes:
        level: Name of the level of the domain.
        domain: Index of the domain, counted over the whole cluster.
        device: Accelerator of the domain.
        port_bytes_per_s: Rate of a device's own port, bytes/s; None for that of the first level.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    level: Label
    domain: Annotated[int, Numeric, Field(ge=0)]
    device: Device
    port_bytes_per_s: Positive | None = None


class Topology(BaseModel):
    """A cluster.

    Attributes:
        name: Display name.
        description: Description in one sentence.
        source: Origin of the figures.
        device: The accelerator, the same everywhere but in ``groups``.
        levels: Levels from hosts outwards; the last has one domain that holds everything.
        links: Links that differ from the others of their level.
        groups: Domains with devices of another kind.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Label = "cluster"
    description: Words = ""
    source: Words = ""
    device: Device
    levels: tuple[Level, ...] = Field(min_length=1, max_length=16)
    links: Annotated[tuple[Link, ...], Field(fail_fast=True)] = ()
    groups: Annotated[tuple[DeviceGroup, ...], Field(fail_fast=True)] = ()

    @model_validator(mode="after")
    def _fits_together(self) -> Topology:
        names = [level.name for level in self.levels]
        if len(set(names)) < len(names):
            raise ValueError(f"levels {', '.join(names)}: every name is to be used once")
        if self.levels[0].bytes_per_s is None:
            raise ValueError(f"levels[0] ({names[0]}) needs bytes_per_s, the rate of a device's own port")
        inner = None
        for level in reversed(self.levels):
            if inner is None:
                if not isinstance(level.members, int) and len(level.members) != 1:
                    raise ValueError(f"the last level, {level.name}, must be one domain that holds everything")
            elif not isinstance(level.members, int) and len(level.members) != inner:
                raise ValueError(f"level {level.name} lists {len(level.members)} domains where there are {inner}")
            inner = level.members * (inner or 1) if isinstance(level.members, int) else sum(level.members)
            if inner > MOST_DEVICES:
                raise ValueError(f"levels hold at least {inner:,} devices, at most {MOST_DEVICES:,} can be planned")
        seen: dict[tuple[str, int], int] = {}
        for i, link in enumerate(self.links):
            if link.level not in names[1:]:
                raise ValueError(f"links[{i}]: {link.level!r} is not one of the levels {', '.join(names[1:])}")
            if link.member >= len(self.sizes[names.index(link.level) - 1]):
                raise ValueError(f"links[{i}]: there is no member {link.member} in level {link.level}")
            if seen.setdefault((link.level, link.member), i) != i:
                raise ValueError(f"links[{i}] is the link of links[{seen[link.level, link.member]}] again")
        for i, group in enumerate(self.groups):
            if group.level not in names:
                raise ValueError(f"groups[{i}]: {group.level!r} is not one of the levels {', '.join(names)}")
            if group.domain >= len(self.sizes[names.index(group.level)]):
                raise ValueError(f"groups[{i}]: there is no {group.level} {group.domain}")
        held = sorted((self._held(group).start, self._held(group).stop, i) for i, group in enumerate(self.groups))
        for (_, end, one), (start, _, other) in pairwise(held):
            if start < end:
                raise ValueError(f"groups[{min(one, other)}] and groups[{max(one, other)}] have devices in common")
        return self

    @model_validator(mode="after")
    def _loses_nothing_inside(self) -> Topology:
        if self.levels[0].loss_rate:
            raise ValueError("levels[0].loss_rate: losses are modelled on levels above the first only")
        return self

    def _held(self, group: DeviceGroup) -> range:
        """Devices of a group."""
        ends = self._ends[self.index(group.level)]
        return range(ends[group.domain - 1] if group.domain else 0, ends[group.domain])

    @cached_property
    def kinds(self) -> tuple[Device, ...]:
        """Distinct kinds of devices: :attr:`device`, then the devices of :attr:`groups`."""
        return tuple(dict.fromkeys([self.device, *(group.device for group in self.groups)]))

    @cached_property
    def kind_of(self) -> NDArray[np.int64]:
        """Position in :attr:`kinds` of every device's kind."""
        found = np.zeros(self.devices, np.int64)
        for group in self.groups:
            found[self._held(group)] = self.kinds.index(group.device)
        return found

    @cached_property
    def _cards(self) -> NDArray[np.float64]:
        """Rate of every device's network card, bytes/s."""
        return np.array([kind.nic_bytes_per_s for kind in self.kinds])[self.kind_of]

    @cached_property
    def _cards_before(self) -> NDArray[np.float64]:
        """Rate of the network cards of all devices before each, bytes/s."""
        return np.concatenate([[0.0], np.cumsum(self._cards)])

    @cached_property
    def _ports(self) -> NDArray[np.float64]:
        """Rate of every device's own port with all planes, bytes/s."""
        found = np.full(self.devices, self.levels[0].bytes_per_s, np.float64)
        for group in self.groups:
            if group.port_bytes_per_s is not None:
                found[self._held(group)] = group.port_bytes_per_s
        return found

    @cached_property
    def _differing(self) -> dict[tuple[str, int], float]:
        """Capacity of the links that differ, by level and member."""
        return {(link.level, link.member): link.bytes_per_s for link in self.links}

    @cached_property
    def _members(self) -> tuple[tuple[int, ...], ...]:
        """Number of members of every domain, by level."""
        counts: list[tuple[int, ...]] = []
        domains = 1
        for level in reversed(self.levels):
            counts.append(level.members if isinstance(level.members, tuple) else (level.members,) * domains)
            domains = sum(counts[-1])
        return tuple(reversed(counts))

    @cached_property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """Number of devices in every domain, by level."""
        sizes: list[tuple[int, ...]] = []
        for members in self._members:
            if not sizes:
                sizes.append(members)
                continue
            ends = [0, *accumulate(members)]
            sizes.append(tuple(sum(sizes[-1][a:b]) for a, b in pairwise(ends)))
        return tuple(sizes)

    @cached_property
    def least_sizes(self) -> tuple[int, ...]:
        """Number of devices in the smallest domain, by level."""
        return tuple(min(sizes) for sizes in self.sizes)

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.sizes[-1][0]

    @cached_property
    def _ends(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(accumulate(sizes)) for sizes in self.sizes)

    def index(self, level: str) -> int:
        """Return the position of a level by its name.

        Raises:
            PlanError: If there is no such level.
        """
        for i, one in enumerate(self.levels):
            if one.name == level:
                return i
        raise PlanError(
            f"there is no level {level!r}", where=self.name, remedy=", ".join(one.name for one in self.levels)
        )

    def domain(self, device: int, level: int) -> int:
        """Return the domain of a level that holds a device, both counted from 0; level -1 is the device itself."""
        return device if level < 0 else bisect_right(self._ends[level], device)

    def shared_level(self, a: int, b: int) -> int:
        """Return the innermost level with a domain that holds devices ``a`` and ``b``; -1 if they are the same."""
        level = -1
        while self.domain(a, level) != self.domain(b, level):
            level += 1
        return level

    def member_bytes_per_s(self, level: int, member: int) -> float:
        """Return the capacity in each direction of the link from a member into its domain, bytes/s.

        A ``member`` of a ``level`` is a domain of the level below, counted over the whole cluster.
        """
        one = self.levels[level]
        part = (one.planes - one.planes_lost) / one.planes
        if not level:
            return float(self._ports[member]) * part
        own = self._differing.get((one.name, member))
        if own is not None:
            return own * part
        if one.bytes_per_s is not None:
            return one.bytes_per_s * part
        if not self.groups:
            return self.sizes[level - 1][member] * self.device.nic_bytes_per_s / one.oversubscription * part
        last = self._ends[level - 1][member]
        cards = self._cards_before[[last - self.sizes[level - 1][member], last]]
        return float(cards[1] - cards[0]) / one.oversubscription * part

    @cached_property
    def _offsets(self) -> tuple[int, ...]:
        """Position of the first resource of each level; the network cards come last."""
        counts = [self.devices, *(len(sizes) for sizes in self.sizes[:-1]), self.devices]
        return (0, *accumulate(2 * count for count in counts))

    @cached_property
    def capacities(self) -> NDArray[np.float64]:
        """Bytes per second of every resource: for each level its members' links, out and in; then network cards."""
        parts = []
        for level in range(len(self.levels)):
            members = self.devices if level == 0 else len(self.sizes[level - 1])
            if (self.links or self.groups) and level:
                one = [self.member_bytes_per_s(level, member) for member in range(members)]
            elif level == 0:
                one = (
                    self._ports * (self.levels[0].planes - self.levels[0].planes_lost) / self.levels[0].planes
                ).tolist()
            else:
                by_size = {size: self.member_bytes_per_s(level, i) for i, size in enumerate(self.sizes[level - 1])}
                one = [by_size[size] for size in self.sizes[level - 1]]
            parts.append(np.repeat(one, 2))
        parts.append(np.repeat(self._cards, 2))
        return np.concatenate(parts)

    def resource(self, level: int, member: int, inwards: bool) -> int:
        """Return the position of a member's link in :attr:`capacities`.

        Args:
            level: Level whose domain the link leads into; ``len(levels)`` for the devices' network cards.
            member: Member of the level below, counted over the whole cluster.
            inwards: Whether bytes go to the member instead of from it.
        """
        return self._offsets[level] + 2 * member + inwards

    def changed(self, changes: Mapping[str, float | str | None]) -> Topology:
        """Return the cluster with other figures, such as one more fibre.

        Links and ports that differ keep theirs; :func:`cordillera.planning.changes.with_changes` changes them too.

        Args:
            changes: New values by dotted path, or factors such as ``*=2``: ``{"region.bytes_per_s": "*=2"}``,
                ``{"building.oversubscription": 1.0}``, ``{"device.memory_bytes": 96e9}``.

        Raises:
            PlanError: If a path does not exist or a value is out of range.
        """
        content = self.model_dump()
        for path, value in changes.items():
            *parents, key = path.split(".")
            if parents == ["device"]:
                place = content["device"]
            elif len(parents) == 1:
                place = content["levels"][self.index(parents[0])]
            else:
                raise PlanError("is no key of a cluster", where=path, remedy="write level.key or device.key")
            if key not in place:
                raise PlanError("is no key of a cluster", where=path, remedy=f"keys there are {', '.join(place)}")
            if not isinstance(value, str) or not re.match(r"[*/]=", value):
                place[key] = value
            elif key == "bytes_per_s" and place[key] is None:
                validate(Topology, content, self.name)._change_rates(content, self.index(parents[0]), value, path)
            else:
                place[key] = _times(place[key], value, path)
        try:
            return validate(Topology, content, self.name)
        except PlanError as error:  # changes name levels, and so do their errors
            named = re.sub(r"levels\[(\d+)\]", lambda found: self.levels[int(found[1])].name, error.what)
            raise PlanError(named, where=self.name) from error

    def _change_rates(self, content: dict[str, Any], at: int, change: str, path: str) -> None:
        """Change the rates of a level that follow from network cards; members with other cards get links of their own.

        Links that differ in the description stay as they are.
        """
        one = self.levels[at]
        whole = one.planes / (one.planes - one.planes_lost)
        rates = [
            _times(self.member_bytes_per_s(at, member) * whole, change, path)
            for member in range(len(self.sizes[at - 1]))
        ]
        usual = statistics.mode(rates)
        content["levels"][at].update(bytes_per_s=usual, oversubscription=1.0)
        content["links"] = [
            *content["links"],
            *(
                {"level": one.name, "member": member, "bytes_per_s": rate}
                for member, rate in enumerate(rates)
                if rate != usual and (one.name, member) not in self._differing
            ),
        ]

    def without(self, level: str, domain: int = 0) -> Topology:
        """Return the cluster without a domain and all that it holds; a domain left empty is removed with it.

        Args:
            level: Name of the level of the domain; ``device`` for one accelerator.
            domain: Index of the domain, counted from 0 over the whole cluster.

        Raises:
            PlanError: If there is no such domain, or nothing else.
        """
        at = -1 if level == "device" else self.index(level)
        sizes = ((1,) * self.devices, *self.sizes)  # sizes[k + 1] are those of level k
        if not 0 <= domain < len(sizes[at + 1]):
            last = len(sizes[at + 1]) - 1
            raise PlanError(f"there is no {level} {domain}", where=self.name, remedy=f"0 to {last:,}")
        if sizes[at + 1][domain] == self.devices:
            raise PlanError(f"nothing is left without {level} {domain}", where=self.name)
        end = sum(sizes[at + 1][: domain + 1])
        gone = range(end - sizes[at + 1][domain], end)  # devices
        kept: list[NDArray[np.bool_]] = []  # remaining domains of every level, devices first
        for one in sizes:
            ends = np.cumsum(one)
            kept.append((ends - one < gone.start) | (ends > gone.stop))
        content = self.model_dump()
        for i, members in enumerate(self._members):
            starts = np.cumsum([0, *members[:-1]])
            left = np.add.reduceat(kept[i].astype(int), starts)[kept[i + 1]].tolist()
            content["levels"][i]["members"] = left[0] if len(set(left)) == 1 else left
        names = [one.name for one in self.levels]
        content["links"] = [
            {**link.model_dump(), "member": int(below[: link.member].sum())}
            for link in self.links
            if (below := kept[names.index(link.level)])[link.member]
        ]
        content["groups"] = [
            {**group.model_dump(), "domain": int(same[: group.domain].sum())}
            for group in self.groups
            if (same := kept[names.index(group.level) + 1])[group.domain]
        ]
        content["name"] = f"{self.name} without {level} {domain}"
        return validate(Topology, content, self.name)


def _times(value: object, change: str, path: str) -> float:
    """Apply ``*=`` or ``/=`` to a number; validation checks the result."""
    try:
        factor = float(change[2:])
    except ValueError:
        raise PlanError(f"{change} has no number", where=path, remedy="write a factor, such as *=2") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PlanError("is not one number that could be changed by a factor", where=path, remedy=f"write {path}=...")
    if change[0] == "/" and not factor:
        raise PlanError("cannot be divided by 0", where=path, remedy="another factor")
    return value * factor if change[0] == "*" else value / factor


def validate(model: type[AnyModel], content: Mapping[str, Any], source: str) -> AnyModel:
    """Make a description of the type ``model``, such as :class:`Topology`, from the content of a TOML file.

    Raises:
        PlanError: If values in ``content`` are wrong; the message names ``source`` and lists every mistake.
    """
    try:
        return model.model_validate(content)
    except ValidationError as error:
        entries = error.errors(include_url=False)
        problems = explain(entries[:_MOST_EXPLAINED], partial(known_keys, model), most=_MOST_EXPLAINED)
        count = "1 mistake" if len(problems) == 1 else f"{len(problems):,} mistakes"
        count += " or more" if len(entries) > _MOST_EXPLAINED else ""
        shown = problems[:_MOST_LISTED]
        listing = "".join(f"\n  {path}: {message}" for path, message in shown)
        listing += f"\n  and {len(problems) - len(shown):,} more" if len(problems) > len(shown) else ""
        raise PlanError(f"{count}{listing}", where=source) from error


def shipped(package: str = "cordillera.clusters") -> dict[str, str]:
    """Return the names of the descriptions in a package, with the description of each."""
    found = {}
    for entry in sorted(resources.files(package).iterdir(), key=lambda e: e.name):
        if entry.name.endswith(".toml"):
            content = parse_toml(entry.read_text(encoding="utf-8"), entry.name, error=PlanError)
            found[entry.name.removesuffix(".toml")] = str(content.get("description", ""))
    return found


def parse(source: str | Path, package: str, kind: str) -> dict[str, Any]:
    """Read the values of a description, including its name, without validation.

    The ``source`` is a path or the name of a file in ``package``; ``kind`` is what errors call it: cluster, workload.

    Raises:
        PlanError: If there is no such file, or it is not TOML.
    """
    entries, where = [one.name for one in resources.files(package).iterdir()], str(source)
    names = sorted(name.removesuffix(".toml") for name in entries if name.endswith(".toml"))
    if where in names:
        text = (resources.files(package) / f"{where}.toml").read_text(encoding="utf-8")
    elif where not in ("", ".") and os.path.lexists(where.replace("\0", "")):
        text = read_text(source, error=PlanError, limit=_MOST_BYTES)
    else:
        close = difflib.get_close_matches(where[:200], names, n=1)
        raise PlanError(
            f"is neither a shipped {kind} nor a file",
            where=where or f"{kind} ''",
            remedy=f"did you mean {close[0]}?" if close else f"shipped: {', '.join(names)}",
        )
    content = parse_toml(text, where, error=PlanError)
    content.setdefault("name", printable(Path(source).stem)[:200])
    return content


def read(model: type[AnyModel], source: str | Path, package: str, kind: str) -> AnyModel:
    """Read a description of the type ``model`` by its shipped name or its path.

    The arguments ``source``, ``package`` and ``kind`` are those of :func:`parse`.

    Raises:
        PlanError: If there is no such file, or its values are wrong; the message lists every mistake.
    """
    return validate(model, parse(source, package, kind), str(source))


def load(source: str | Path) -> Topology:
    """Read a cluster by its shipped name or the path of a TOML file.

    Raises:
        PlanError: If there is no such file, or its values are wrong; the message lists every mistake.
    """
    return read(Topology, source, "cordillera.clusters", "cluster")
