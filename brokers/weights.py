"""The weight broker: immutable versions, published as a whole or not at all, pulled chunk by chunk."""

from dataclasses import dataclass, field
from typing import Any

from brokers.manifest import Manifest
from brokers.roster import Member
from brokers.service import Message, Service
from brokers.waiting import Waiting, WaitingRoom
from common.errors import WireError
from common.group import PolicyVersion
from common.header import Header
from common.section import Buffer


@dataclass(slots=True)
class _Draft:
    """A version under publication by one peer; invisible until every chunk is here and verified."""

    peer: str
    manifest: Manifest
    chunks: dict[int, Buffer] = field(default_factory=dict[int, Buffer])


class WeightService(Service):
    """Keeps the last `keep_versions` versions of one run."""

    def __init__(self, run: str, keep_versions: int) -> None:
        super().__init__(run, "weights")
        self._keep = keep_versions
        self._versions: dict[PolicyVersion, _Draft] = {}
        self._draft: _Draft | None = None
        self._asking = WaitingRoom()
        self.once = {"chunk"}
        self.verbs |= {
            "publish": self._publish,
            "chunk": self._chunk,
            "manifest": self._manifest,
            "pull": self._pull,
            "status": self._status,
        }

    @property
    def latest(self) -> PolicyVersion:
        """The newest complete version; -1 before the first."""
        return max(self._versions, default=-1)

    def state(self) -> dict[str, Any]:
        """Return what every reply carries."""
        return {"latest": self.latest}

    def on_lost(self, member: Member, now: float) -> None:
        """A draft of a publisher that is gone is thrown away."""
        del now
        if self._draft is not None and self._draft.peer == member.peer:
            self._draft = None
        self._asking.withdraw(member.peer)

    def on_time(self, now: float) -> None:
        """Tell those who waited for a newer version that there is none yet."""
        for waiting in self._asking.overdue(now):
            self.reply(waiting.message.peer, waiting.message.header, Header("ok", body=self.state()))

    def serve(self, now: float) -> None:
        """Answer those who waited for a version that is here now."""
        del now
        self._asking.serve(self._try_manifest)

    def _publish(self, message: Message) -> Header:
        manifest = Manifest.from_wire(message.body.get("manifest"))
        known = self._versions.get(manifest.version)
        if known is not None and known.manifest != manifest:
            raise WireError(f"version {manifest.version} is published with other contents; versions never change")
        if known is None and manifest.version <= self.latest:
            raise WireError(f"version {manifest.version} is older than the published version {self.latest}")
        if known is None:
            self._draft = _Draft(message.peer, manifest)
            self._complete()
        return Header("ok", body={**self.state(), "known": known is not None})

    def _chunk(self, message: Message) -> Header:
        version, index = message.integer("version"), message.integer("index")
        draft = self._draft
        if draft is None or draft.manifest.version != version or draft.peer != message.peer:
            raise WireError(f"chunk {index} of version {version}, which {message.peer} is not publishing")
        if not 0 <= index < len(draft.manifest.chunks) or len(message.frames) != 1:
            raise WireError(f"version {version} has {len(draft.manifest.chunks)} chunks, not one numbered {index}")
        draft.manifest.check(index, message.frames[0])
        draft.chunks[index] = message.frames[0]
        self._complete()
        return Header("ok", body=self.state())

    def _complete(self) -> None:
        """Make the draft visible, atomically, when its last chunk is here."""
        draft = self._draft
        if draft is None or len(draft.chunks) < len(draft.manifest.chunks):
            return
        self._versions[draft.manifest.version] = draft
        self._draft = None
        for old in sorted(self._versions)[: -self._keep]:
            del self._versions[old]

    def _manifest(self, message: Message) -> None:
        waiting = Waiting(message, message.now + message.header.deadline_s)
        if not self._try_manifest(waiting):
            self._asking.add(waiting)

    def _try_manifest(self, waiting: Waiting) -> bool:
        message = waiting.message
        if self.latest <= message.integer("newer_than", -1):
            return False
        body = {**self.state(), "manifest": self._versions[self.latest].manifest.to_wire()}
        self.reply(message.peer, message.header, Header("ok", body=body))
        return True

    def _pull(self, message: Message) -> None:
        version, index = message.integer("version"), message.integer("index")
        draft = self._versions.get(version)
        if draft is None:
            raise WireError(f"version {version} is no longer kept; the latest is {self.latest}")
        if index not in draft.chunks:
            raise WireError(f"version {version} has {len(draft.chunks)} chunks, not one numbered {index}")
        self.reply(message.peer, message.header, Header("ok", body=self.state()), (draft.chunks[index],))

    def _status(self, message: Message) -> Header:
        status = {
            **self.state(),
            "run": self.run,
            "bytes": sum(length for draft in self._versions.values() for length, _ in draft.manifest.chunks),
            "versions": sorted(self._versions),
            "workers": [member.describe(message.now) for member in self.roster.members()],
            "refused": dict(self.refused),
            "turned_away": self.turned_away,
        }
        return Header("ok", body={"status": status})
