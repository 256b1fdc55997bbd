"""``cordillera doctor`` finds what works and says why the rest does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cordillera.cli import doctor
from cordillera.cli.app import app
from cordillera.data.files import cache_folder


@pytest.mark.slow
def test_every_finding_says_what_was_found_and_broken_ones_what_to_do() -> None:
    """The JSON holds one object for each thing, and what is broken comes with a remedy."""
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    findings = {entry["name"]: entry for entry in json.loads(result.stdout)}
    assert {"CPU", "memory", "GPU", "disk, cache", "Python", "torch", "sparse update", "FBGEMM", "Numba"} <= set(
        findings
    )
    for entry in findings.values():
        assert set(entry) == {"area", "name", "status", "detail", "remedy"}
        assert entry["status"] in ("usable", "limited", "absent", "broken")
        assert entry["detail"]
        assert entry["status"] != "broken" or entry["remedy"]
    assert findings["torch"]["status"] == "usable"
    assert "torch" in findings["sparse update"]["detail"]


def test_the_table_names_what_the_json_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both views show the same findings; text that looks like markup is shown as it is."""
    finding = doctor.Finding("libraries", "Numba", "broken", "fails [in /a/b]", "pip install 'x[cpu]'")
    monkeypatch.setattr(doctor, "examine", lambda: [finding])
    text = CliRunner().invoke(app, ["doctor"]).stdout
    assert "fails [in /a/b]" in text
    assert "x[cpu]" in text
    assert json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)[0]["name"] == "Numba"


def test_a_library_that_kills_its_process_is_a_finding() -> None:
    """A crash or an endless import is reported, and does not end the command."""
    worked, reason = doctor._probe("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert not worked
    assert "SIGSEGV" in reason


def test_an_import_without_end_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for ever."""
    monkeypatch.setattr(doctor, "_PROBE_SECONDS", 0.5)
    worked, reason = doctor._probe("import time; time.sleep(60)")
    assert not worked
    assert "no answer" in reason


def test_fbgemm_for_another_torch_is_named_with_the_version_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mismatch is found by version, before the library is imported."""
    versions = {"fbgemm-gpu-cpu": "1.6.0", "torch": "2.13.0+cpu"}
    monkeypatch.setattr(doctor, "_version", lambda *names: next((n, versions[n]) for n in names if n in versions))
    monkeypatch.setattr(doctor, "_probe", lambda code: pytest.fail("imported a library that cannot fit"))
    finding = doctor._fbgemm()
    assert finding.status == "broken"
    assert "1.6.0" in finding.detail
    assert "2.13.0" in finding.detail
    assert finding.remedy is not None
    assert "fbgemm-gpu-cpu==1.8" in finding.remedy


def test_absent_fbgemm_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without FBGEMM another back end updates the tables, and the finding says so."""
    monkeypatch.setattr(doctor, "_version", lambda *names: ("torch", "2.13.0") if "torch" in names else None)
    finding = doctor._fbgemm()
    assert finding.status == "absent"
    assert "another back end" in finding.detail


def test_a_cache_folder_that_is_a_file_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The finding names the folder that CORDILLERA_CACHE points to."""
    blocker = tmp_path / "file"
    blocker.write_text("", encoding="utf-8")
    monkeypatch.setenv("CORDILLERA_CACHE", str(blocker / "cache"))
    finding = doctor._disk("disk, cache", cache_folder(), "point it elsewhere")
    assert finding.status == "broken"
    assert str(blocker) in finding.detail
    assert finding.remedy == "point it elsewhere"


def test_without_a_compiler_only_compilation_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiler is not an error: nothing but torch.compile on the CPU needs one."""
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    finding = doctor._compiler()
    assert finding.status == "absent"
    assert "torch.compile" in finding.detail
