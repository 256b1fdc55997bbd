"""Settings of streams of events and labels."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cordillera.data.ranking.features import Schema
from cordillera.data.ranking.logs.click_logs import FileFormat
from cordillera.mistakes import text_of

StreamName = Annotated[
    str, text_of("[A-Za-z0-9][A-Za-z0-9_-]*", "letters, digits, hyphens and underscores, without spaces")
]


class EventStreamConfig(BaseModel):
    """Files of one stream.

    Attributes:
        events: File, folder or pattern, or several of them, with the events: the schema's columns without labels. Files
            are read in the order of their names, rows in their order; new files may be added later.
        labels: The same with the labels: the first column of ``schema.ids``, the timestamp, and labels, blank where one
            is not known. Default: labels are in the rows of the events.
        label_timestamp: Column of the events with the time of their labels, where they are in the same rows. Default:
            the event's own time.
        format: Format of the files. Default: the format that the file names imply.
        student: Recipe of the model that learns from this stream, for ``--students``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    events: str | tuple[str, ...]
    labels: str | tuple[str, ...] | None = None
    label_timestamp: str | None = None
    format: FileFormat | None = None
    student: str | None = None

    @model_validator(mode="after")
    def _labels_have_one_place(self) -> EventStreamConfig:
        if self.labels is not None and self.label_timestamp is not None:
            raise ValueError("label_timestamp is for labels in the rows of the events; files of labels have their own")
        return self


class JoinConfig(BaseModel):
    """Settings of the join of events and labels.

    Attributes:
        window_s: Seconds after an event in which its labels count; an event is complete once they are over.
        lateness_s: Seconds by which a row may be later in its files than rows of its time.
        unlabelled: Treatment of labels that are late or absent: ``zero`` (no click), ``missing`` (the schema then has
            ``missing_labels``), or ``drop`` (events without any label are left out).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    window_s: int = Field(ge=0, le=10**10)
    lateness_s: int = Field(0, ge=0, le=10**10)
    unlabelled: Literal["zero", "missing", "drop"] = "zero"


def check_stream_schema(schema: Schema) -> None:
    """Check that events of a schema can be identified and ordered.

    Raises:
        ValueError: If the schema has no timestamp or no id, or columns that only augmentation makes.
    """
    if schema.timestamp is None:
        raise ValueError("streams are joined in time: name schema.timestamp")
    if not schema.ids:
        raise ValueError("labels find their event by its id: name its column first in schema.ids")
    if schema.teacher is not None:
        raise ValueError("the scores of a teacher are made here: leave schema.teacher to the students' recipes")
    if made := sorted(name for name in {*schema.columns, *schema.ids} if name.startswith(("teacher_", "__join_"))):
        raise ValueError(f"columns that begin with 'teacher_' or '__join_' are made here: {made}")
