"""A server of a small model that drafts, for tests of routes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from cordillera.kernels.dense.few_rows import MOST_ROWS
from cordillera.serving.http.app import Services
from cordillera.serving.language.language_model import LanguageModel
from cordillera.serving.language.speculation import NGramDrafter, Speculation
from cordillera.serving.language.text_service import TextService
from tests.serving.servers import SECONDS, listening, open_model, open_services, wait_until_idle
from tests.serving.small_models import write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "small", head_dim=32, tied=False, context=400)


@pytest.fixture(scope="module")
def model(folder: Path) -> LanguageModel:
    opened = open_model(folder, dtype="bfloat16")
    opened.speculation = Speculation([NGramDrafter], [1.0] * MOST_ROWS)
    return opened


@pytest.fixture(scope="module")
def _all(model: LanguageModel) -> Services:
    return open_services(model, texts=8, queue=100)


@pytest.fixture(scope="module")
def url(_all: Services) -> Iterator[str]:
    with listening(_all, body_bytes=1 << 20) as address:
        yield address


@pytest.fixture
def service(_all: Services) -> Iterator[TextService]:
    """The service behind the address; a test leaves nothing in it."""
    yield _all.texts["small"]
    wait_until_idle(_all.texts["small"])


@pytest.fixture
def client(url: str, service: TextService) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=SECONDS) as opened:
        yield opened


@pytest.fixture
def plain(url: str, service: TextService) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=SECONDS) as opened:
        yield opened
