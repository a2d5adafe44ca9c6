"""Where a model is cut: plans, costs, strategies, and the optimal contiguous cut."""

from __future__ import annotations

from torchslicer.partition.cost import RangeCost, UnitCosts, memory_cost, parameter_cost, static_costs, time_cost
from torchslicer.partition.cuts import check_num_stages, cuts_from_names, format_bytes, validate_cuts
from torchslicer.partition.optimal import cut_positions, nearest_starts, optimal_starts
from torchslicer.partition.plan import BoundaryValue, Plan, StagePlan, build_plan
from torchslicer.partition.strategies import Strategy, register_strategy, resolve_strategy, strategy_names

__all__ = [
    "BoundaryValue",
    "Plan",
    "RangeCost",
    "StagePlan",
    "Strategy",
    "UnitCosts",
    "build_plan",
    "check_num_stages",
    "cut_positions",
    "cuts_from_names",
    "format_bytes",
    "memory_cost",
    "nearest_starts",
    "optimal_starts",
    "parameter_cost",
    "register_strategy",
    "resolve_strategy",
    "static_costs",
    "strategy_names",
    "time_cost",
    "validate_cuts",
]
