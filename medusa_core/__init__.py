"""MEDUSA itself: heads, losses, trees, acceptance, the decoding engine. Needs neither prefect nor ray nor deepspeed."""

from medusa_core.engine import MedusaEngine
from medusa_core.heads import HeadsConfig, MedusaHeads
from medusa_core.portfolio import Portfolio
from medusa_core.request import Generation, Progress
from medusa_core.sampling import SamplingParams
from medusa_core.session import DecodingSession
from medusa_core.tree import Tree

__all__ = [
    "DecodingSession",
    "Generation",
    "HeadsConfig",
    "MedusaEngine",
    "MedusaHeads",
    "Portfolio",
    "Progress",
    "SamplingParams",
    "Tree",
]
