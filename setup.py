"""Maps the top-level folders onto the import package ``metagrpo``; everything else is in pyproject.toml."""

from setuptools import find_packages, setup

FOLDERS = {
    "metagrpo": "metagrpo",
    "metagrpo.kernels": "kernels",
    "metagrpo.trainer": "trainer",
    "metagrpo.bench": "bench",
}


def packages() -> list[str]:
    """Every package below the mapped folders, under its installed name."""
    names = []
    for package, folder in FOLDERS.items():
        names.append(package)
        names += [f"{package}.{child}" for child in find_packages(folder)]
    return names


setup(packages=packages(), package_dir=FOLDERS)
