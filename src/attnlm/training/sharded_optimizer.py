"""The optimizer of a sharded model: each process updates its part of every parameter."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from attnlm.compute.processes import Processes, rows_of
from attnlm.config.training import TrainingConfig
from attnlm.training.optimizer import Optimizer, Span, placed_spans
from attnlm.training.sharding import local_part, part_of_whole
from attnlm.training.update_rules import AdamW, Muon, orthogonalize


class ShardedOptimizer(Optimizer):
    """AdamW works on the parts as they are; Muon's matrices are gathered, each in one process.

    The gradients that FSDP leaves are the mean of all processes' already.
    """

    def __init__(self, model: nn.Module, config: TrainingConfig, processes: Processes) -> None:
        super().__init__(placed_spans(model, config, local_part), config)
        self._processes = processes
        parameters = dict(model.named_parameters())
        for span in self._spans:
            parameter = parameters[span.name]
            gradient = self.gradient[span.part].view(span.values.shape)
            mesh = processes.mesh(gradient.device.type)
            parameter.grad = part_of_whole(gradient, parameter.shape, mesh)
        self.shapes = {name: parameter.shape for name, parameter in parameters.items()}
        """Of whole parameters"""
        for place, spans, part in self._places():
            if place.shape is not None:
                self._groups.append(self._muon(place.shape, spans, part, self._decay(place)))
            elif there := [span for span in spans if span.values.numel()]:
                self._groups.append(self._adamw(there, self._decay(place)))

    def _adamw(self, spans: list[Span], decay: float) -> AdamW:
        def each(vector: Tensor) -> list[Tensor]:
            return [vector[span.part] for span in spans]

        values = [span.values.view(-1) for span in spans]
        remembered = each(self._mean), each(self._square)
        return AdamW(values, each(self.gradient), *remembered, decay, self._config)

    def _muon(self, shape: tuple[int, int], spans: list[Span], part: slice, decay: float) -> Muon:
        stack = len(spans), *spans[0].values.shape
        gradient, mean = self.gradient[part].view(stack), self._mean[part].view(stack)
        orthogonalized = functools.partial(_orthogonalize_rows, shape[0], self._processes)
        values = [span.values for span in spans]
        return Muon(values, gradient, mean, decay, self._config, shape, orthogonalized)

    def exchanged(self) -> tuple[Tensor, Tensor]:
        behind = self._exchanged[len(self.gradient) :]
        return behind, behind

    def average(self, pieces: int) -> None:
        self.gradient.mul_(self._processes.count / pieces)

    def _norm(self) -> Tensor:
        square: Tensor = torch.linalg.vector_norm(self.gradient).square()
        self._processes.add_up(square, "a step")
        return square.sqrt()


def _orthogonalize_rows(
    rows: int, processes: Processes, parts_Nrc: Tensor, dtype: torch.dtype
) -> Tensor:
    """`orthogonalize` for the r rows that this process has of N matrices: (N, r, C) → the same.

    Process k makes the matrices k, k + count, … whole.
    """
    import torch.distributed as dist

    count, rank, width = processes.count, processes.rank, parts_Nrc.size(2)
    group = processes.mesh(parts_Nrc.device.type).get_group()
    ours = len(range(rank, len(parts_Nrc), count))
    heights = [(r := rows_of(rows, k, count)).stop - r.start for k in range(count)]
    sent = [len(range(k, len(parts_Nrc), count)) * heights[rank] * width for k in range(count)]
    received = [ours * height * width for height in heights]
    outgoing = torch.cat([parts_Nrc[k::count].flatten() for k in range(count)])
    incoming = outgoing.new_empty(sum(received))
    dist.all_to_all_single(incoming, outgoing, received, sent, group=group)
    pieces = incoming.split(received)
    whole_nRC = torch.cat(
        [p.view(ours, h, width) for p, h in zip(pieces, heights, strict=True)], dim=1
    )
    if ours:
        whole_nRC = orthogonalize(whole_nRC, dtype)
    incoming = torch.cat([piece.flatten() for piece in whole_nRC.split(heights, dim=1)])
    dist.all_to_all_single(outgoing, incoming, sent, received, group=group)
    result = torch.empty_like(parts_Nrc)
    for k, piece in enumerate(outgoing.split(sent)):
        result[k::count] = piece.view(result[k::count].shape)
    return result
