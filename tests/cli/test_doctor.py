"""``cordillera doctor`` finds what works and says why the rest does not."""

from __future__ import annotations

import io
import json
import pwd
from pathlib import Path
from typing import Any

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
    optional = {"OR-tools", "optuna", "onnxscript", "ONNX Runtime", "MLflow", "Weights & Biases"}
    assert {findings[name]["status"] for name in optional} <= {"usable", "absent"}
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


def test_a_probe_tells_its_last_line_or_its_error() -> None:
    said = "import sys; print('one'); print(' two '); print('wrong', file=sys.stderr)"
    assert doctor._probe(said) == (True, "two")
    assert doctor._probe(f"{said}; 1 / 0") == (False, "ZeroDivisionError: division by zero")


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


@pytest.mark.slow
def test_forks_of_one_process_find_what_processes_find(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that crashes or hangs in one fork leaves the others alone."""
    monkeypatch.setattr(doctor, "_PROBE_SECONDS", 90.0)
    said = "import sys; print('one'); print(' two '); print('wrong', file=sys.stderr)"
    crash = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    hang = "import time; time.sleep(120)"
    ones = "import torch; print(torch.ones(2).sum())"
    found = doctor._probe_with_torch([[said], [crash, said], [f"{said}; 1 / 0", ones, crash], [hang], [ones]])
    assert found[0] == (True, "two")
    for number in (1, 2, 5):  # what follows a crash cannot run; what follows an error can, and its crash is its own
        assert not found[number][0]
        assert "SIGSEGV" in found[number][1]
    assert found[3] == (False, "ZeroDivisionError: division by zero")
    assert found[4] == found[7] == (True, "tensor(2.)")
    assert found[6] == (False, "no answer within 45 seconds")
    monkeypatch.setattr(doctor, "_FORKS", "raise ImportError('torch is broken')")
    assert doctor._probe_with_torch([[said], [said]]) == [(False, "ImportError: torch is broken")] * 2


def test_fbgemm_for_another_torch_is_named_with_the_version_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mismatch is found by version, even if the library can be imported."""
    versions = {"fbgemm-gpu-cpu": "1.6.0", "torch": "2.13.0+cpu"}
    monkeypatch.setattr(doctor, "_version", lambda *names: next((n, versions[n]) for n in names if n in versions))
    finding = doctor._fbgemm(True, "[0, 2, 5]")
    assert finding.status == "broken"
    assert "1.6.0" in finding.detail
    assert "2.13.0" in finding.detail
    assert finding.remedy is not None
    assert "fbgemm-gpu-cpu==1.8" in finding.remedy


def test_absent_fbgemm_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without FBGEMM another back end updates the tables, and the finding says so."""
    monkeypatch.setattr(doctor, "_version", lambda *names: ("torch", "2.13.0") if "torch" in names else None)
    finding = doctor._fbgemm(False, "ModuleNotFoundError")
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


def test_a_folder_behind_a_link_that_leads_nowhere_is_broken(tmp_path: Path) -> None:
    (tmp_path / "runs").symlink_to(tmp_path / "unmounted")
    for folder in (tmp_path / "runs", tmp_path / "runs" / "below"):
        finding = doctor._disk("disk, runs", folder, "name another")
        assert (finding.status, finding.remedy) == ("broken", "name another")
        assert finding.detail == f"{folder}: {tmp_path / 'runs'} is a link that leads nowhere"


def test_a_user_without_a_home_folder_is_told_to_set_one_for_the_cache(
    cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(user: int) -> None:
        raise KeyError(user)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "CORDILLERA_CACHE"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("NUMBA_CACHE_DIR", "numba")
    finding = doctor._cache()
    remedy = "set CORDILLERA_CACHE to a folder that can be written"
    assert (finding.status, finding.remedy) == ("broken", remedy)
    assert "no home folder" in finding.detail
    done = cli("data", "get", "synthetic")
    assert (done.code, done.err.splitlines()[-1]) == (2, f"  -> {remedy}")
    assert "no home folder" in done.err
    monkeypatch.setenv("CORDILLERA_CACHE", "elsewhere")
    assert cache_folder() == Path("elsewhere")


def test_a_cache_folder_below_one_that_may_not_be_entered_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", refused)
    found = doctor._disk("cache", Path("/locked/cache"), "choose another")
    assert (found.status, found.remedy) == ("broken", "choose another")
    assert "Permission denied" in found.detail


def test_without_a_compiler_only_compilation_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiler is not an error: nothing but torch.compile on the CPU needs one."""
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    finding = doctor._compiler()
    assert finding.status == "absent"
    assert "torch.compile" in finding.detail


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("script", "status", "detail"),
    [
        ("exit 0", "usable", "torch.compile on the CPU"),
        ("echo no OpenMP here >&2; echo more >&2; exit 1", "broken", "cannot build for OpenMP: no OpenMP here"),
        ("exit 1", "broken", "cannot build for OpenMP: no message"),
        ("sleep 60", "broken", "does not answer"),
    ],
)
def test_a_compiler_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, status: str, detail: str
) -> None:
    """What a compiler says when it builds a small program decides."""
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(doctor, "_PROBE_SECONDS", 2.0 if script == "sleep 60" else 60.0)
    finding = doctor._compiler()
    assert (finding.status, finding.name) == (status, "C++ compiler")
    assert str(compiler) in finding.detail
    assert detail in finding.detail
    assert (finding.remedy is None) == (status == "usable")


def _readable(monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> None:
    """Let the command read files of the system that say something else."""

    def read(path: Any, *arguments: Any, **options: Any) -> Any:
        if str(path) not in files:
            raise OSError
        return io.StringIO(files[str(path)])

    monkeypatch.setattr(doctor, "open", read, raising=False)
    monkeypatch.setattr(doctor.Path, "read_text", lambda path, **options: read(path).read())


@pytest.mark.parametrize(
    ("flags", "status", "named"),
    [
        ("avx2", "limited", "AVX2; no AVX-512"),
        ("avx2 avx512f", "limited", "AVX2, AVX-512;"),
        ("avx2 amx_bf16", "usable", "AVX2, AMX bf16"),
        ("", "usable", ""),
    ],
)
def test_the_processor_and_its_instructions_are_named(
    monkeypatch: pytest.MonkeyPatch, flags: str, status: str, named: str
) -> None:
    """Without instructions for bf16, training in it only saves memory traffic, or takes longer, which is said."""
    _readable(monkeypatch, {"/proc/cpuinfo": f"model name\t: A Processor\nflags\t\t: {flags}\nmodel name: another\n"})
    monkeypatch.setattr(doctor, "usable_cores", lambda: 4)
    monkeypatch.setattr(doctor, "quota", lambda: 2.5)
    finding = doctor._cpu()
    assert finding.status == status
    assert finding.detail.startswith("A Processor, ")
    assert "4 usable cores (the container may use 2.5 of them)" in finding.detail
    assert named in finding.detail
    assert ("bf16 is emulated" in finding.detail) == (status == "limited") == (finding.remedy is not None)
    monkeypatch.setattr(doctor, "quota", lambda: 4.0)
    assert "container" not in doctor._cpu().detail


def test_memory_is_that_of_the_system_and_of_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of a container is named if it is lower."""
    monkeypatch.setattr(doctor.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**20}.__getitem__)
    monkeypatch.setattr(doctor, "keep_freed_memory", lambda: None)
    files = {"/sys/fs/cgroup/memory.max": str(2**31), "/proc/meminfo": "MemTotal: 1 kB\nMemAvailable: 1048576 kB\n"}
    _readable(monkeypatch, files)
    assert doctor._memory().detail == (
        "4.0 GiB, of which the container may use 2.0 GiB; 1.0 GiB available now; a training process "
        "keeps the memory that a step frees, for the next step"
    )
    _readable(monkeypatch, {"/sys/fs/cgroup/memory.max": str(2**32)})
    monkeypatch.setattr(doctor, "keep_freed_memory", lambda: "an allocator of its own")
    assert doctor._memory().detail == (
        "4.0 GiB; what a step of training frees goes back to the system, which makes steps slower: "
        "an allocator of its own"
    )


def test_a_driver_without_a_device_has_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU is usable, absent, not for this torch, or hidden."""
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert doctor._gpu(None, []).status == "absent"
    assert doctor._gpu("13.0", ["H200"]).detail == "H200; torch with CUDA 13.0"
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/bin/nvidia-smi")
    assert doctor._gpu(None, []).status == "limited"
    assert doctor._gpu("13.0", []).status == "broken"


def test_findings_are_ordered_by_area(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks run side by side; what they find is shown from the machine to the libraries."""
    torch = ("_torch_and_gpu", "python"), ("_update_backends", "back ends"), ("_fbgemm", "libraries")
    both = [doctor.Finding(area, name, "usable", "as it is") for name, area in torch]
    monkeypatch.setattr(doctor, "_with_torch", lambda: both)
    for name in ("_pip", "_numba", "_triton", "_compiler", "_tensorboard", "_optional", "_fuxictr"):
        area = "python" if name == "_pip" else "libraries"
        monkeypatch.setattr(doctor, name, lambda name=name, area=area: doctor.Finding(area, name, "absent", "no"))
    areas = [finding.area for finding in doctor.examine()]
    assert areas == sorted(areas, key=["machine", "python", "back ends", "libraries"].index)
    assert {area: areas.count(area) for area in areas} == {"machine": 4, "python": 3, "back ends": 1, "libraries": 7}
