"""MEDUSA itself: heads, losses, trees, acceptance, the decoding engine. Needs neither prefect nor ray nor deepspeed."""

from medusa_core.engine import MedusaEngine
from medusa_core.heads import HeadsConfig, MedusaHeads
from medusa_core.session import Generation, SamplingParams
from medusa_core.tree import Tree

__all__ = ["Generation", "HeadsConfig", "MedusaEngine", "MedusaHeads", "SamplingParams", "Tree"]
