"""Fetch a benchmark's files, or say exactly which files to put where.

    python scripts/prepare_benchmarks.py videomme --data-root /data/eval      # annotations and videos
    python scripts/prepare_benchmarks.py all --data-root /data/eval --annotations-only

What is there already is checked and kept. Without a network, or for data sets that are not on Hugging Face, the files
that are missing are listed with their places, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import re
import sys
import tarfile
import zipfile
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from datamodules.common.places import add_config_dirs
from eval.benchmarks import catalogue
from eval.benchmarks.base import Benchmark
from eval.benchmarks.loading import file_status, load

ANNOTATIONS = ("*.json", "*.jsonl", "*.parquet", "*.csv", "*.tsv", "*.srt", "subtitle*.zip", "*subtitle*.tar*")

SPLIT_ARCHIVE = re.compile(r"\.part[._-]?\w+$|\.(?:zip|tar|gz)\.\w{2,3}$|\.z\d\d$")
TAR_ARCHIVE = re.compile(r"\.(?:tar|tgz|tar\.gz)$")


def main(arguments: list[str] | None = None) -> int:
    """Prepare the named benchmarks; 0 = all their annotation files are there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", help="names of conf/benchmark, or `all`")
    parser.add_argument("--config-dir", help="your own folder of options, whose benchmark/ is looked in too")
    parser.add_argument("--data-root", type=Path, default=Path("data/eval"), help="folder of all benchmarks")
    parser.add_argument("--annotations-only", action="store_true", help="no videos")
    parser.add_argument("--offline", action="store_true", help="fetch nothing, only say what is missing")
    options = parser.parse_args(arguments)
    try:
        add_config_dirs([options.config_dir] if options.config_dir else [])
        names = catalogue.select("all" if options.names == ["all"] else options.names)
    except ValueError as error:
        parser.error(str(error))
    ready = [prepare(catalogue.get(name), options) for name in names]
    return 0 if all(ready) else 1


def prepare(benchmark: Benchmark, options: argparse.Namespace) -> bool:
    """Fetch and check one benchmark; whether its default split can be loaded."""
    folder = options.data_root / (benchmark.variant_of or benchmark.name)
    if not _is_complete(benchmark, options):
        for place in () if options.offline else benchmark.download:
            if "://" not in place:
                fetch(place, folder, options.annotations_only)
        unpack(folder)
    if not _is_ready(benchmark, options.data_root):
        explain(benchmark, options.data_root)
        return False
    try:
        items, report = load(benchmark, options.data_root)
    except ValueError as error:
        print(f"{benchmark.name}: {error}")
        return False
    print(f"{benchmark.name}: {len(items)} questions ({report.source} files), official number {report.expected_n}")
    for note in report.notes:
        print(f"  note: {note}")
    if report.missing_media:
        print(f"  {len(report.missing_media)} media files are missing, for example:")
        for path in report.missing_media[:3]:
            print(f"    {path}")
    return True


def _is_complete(benchmark: Benchmark, options: argparse.Namespace) -> bool:
    """Whether there is nothing to fetch: annotations and, where they are wanted, all videos are there."""
    if not _is_ready(benchmark, options.data_root) or options.annotations_only:
        return _is_ready(benchmark, options.data_root)
    try:
        return not load(benchmark, options.data_root)[1].missing_media
    except ValueError:
        return False


def _is_ready(benchmark: Benchmark, root: Path) -> bool:
    return any(status.ready for status in file_status(benchmark, root) if status.split == benchmark.split)


def fetch(dataset: str, folder: Path, annotations_only: bool) -> None:
    """Download a Hugging Face data set into `folder`; failures are reported, not raised."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    patterns = list(ANNOTATIONS) if annotations_only else None
    try:
        snapshot_download(dataset, repo_type="dataset", local_dir=folder, allow_patterns=patterns)
        print(f"{dataset}: fetched into {folder}")
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        print(f"{dataset}: could not be fetched ({type(error).__name__}: {str(error).splitlines()[0][:200]})")


def unpack(folder: Path) -> None:
    """Unpack the archives of a download beside themselves, once; split archives are named."""
    for archive in sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else ():
        marker = archive.with_name(f"{archive.name}.unpacked")
        if marker.exists() or archive.suffix == ".unpacked":
            continue
        try:
            if archive.suffix == ".zip":
                with zipfile.ZipFile(archive) as opened:
                    opened.extractall(archive.parent)  # zipfile keeps members inside of the target
            elif TAR_ARCHIVE.search(archive.name):
                with tarfile.open(archive) as opened:
                    opened.extractall(archive.parent, filter="data")  # refuses members outside of the target
            elif SPLIT_ARCHIVE.search(archive.name):
                print(f"{archive} is a part of a split archive: join the parts (cat), unpack them in {archive.parent}")
                continue
            else:
                continue
        except (OSError, EOFError, zlib.error, zipfile.BadZipFile, tarfile.TarError) as error:
            print(f"{archive} cannot be unpacked ({error}); the same command tries again")
            continue
        marker.touch()
        print(f"unpacked {archive}")


def explain(benchmark: Benchmark, root: Path) -> None:
    """Print where the files come from and where they belong."""
    folder = root / (benchmark.variant_of or benchmark.name)
    print(f"{benchmark.name} ({benchmark.title}, split {benchmark.split}): annotation files are missing.")
    print(f"  get them from: {', '.join(benchmark.download)}")
    sources = [source for source in benchmark.sources if benchmark.split in source.files]
    for number, source in enumerate(sources):
        print(f"  {'put' if number == 0 else 'or'} ({source.name}) below {folder}/:")
        for entry in source.files[benchmark.split]:
            print(f"    {entry if isinstance(entry, str) else '  or  '.join(entry)}")
    media = dict.fromkeys(path for source in sources for path in source.media if source.name.startswith("official"))
    print(f"  videos belong to one of: {', '.join(f'{folder}/{path}' for path in list(media)[:4])}")
    if benchmark.subtitle_files and benchmark.subtitles != "none":
        print(f"  subtitles: {', '.join(f'{folder}/{path}' for path in benchmark.subtitle_files)}")


if __name__ == "__main__":
    sys.exit(main())
