"""A runner on a plain tensor, with block tables made by hand: what the cache service will do, without one."""

import numpy as np
import torch

from kvkeeper.engine_service.compute.model_runner import ModelRunner, kv_layout_of
from tests.support.models.tiny_models import NumericsCase
from tests.support.worlds.batches import ScheduledRow, WantLogits, build_batch


class HandTables:
    """Computes the cases of a model on an arena that is NaN wherever nothing was written, with shuffled block ids."""

    def __init__(self, model, block_size, num_blocks=200, fill=float("nan")):
        self.block_size = block_size
        layout = kv_layout_of(model.config, model.dtype, block_size)
        view = layout.view(torch.zeros(num_blocks * layout.block_bytes, dtype=torch.uint8)).fill_(fill)
        self.runner = ModelRunner(model, view, layout)
        self.free = (np.random.default_rng(0).permutation(num_blocks - 1) + 1).tolist()
        self.num_copies = 0

    def take(self, num_blocks):
        return [self.free.pop() for _ in range(num_blocks)]

    def table_for(self, case: NumericsCase, parent_table):
        """The block table that the case starts with, and how many of its tokens are in the cache already."""
        table, shared = [], max(case.hit_len, case.fork_len)
        if shared:
            table = list(parent_table[: -(-shared // self.block_size)])
            if shared % self.block_size:  # copy-on-write of the partial tail
                (own,) = self.take(1)
                self.runner.copy_blocks([(table[-1], own)])
                table[-1] = own
                self.num_copies += 1
        table += self.take(-(-len(case.tokens) // self.block_size) - len(table))
        return np.array(table, dtype=np.int32), shared

    def compute(self, cases, chunk_size):
        """All logits of all cases [len(tokens), vocab_size] in chunks; every case in one batch as soon as it can be."""
        found = [[] for _ in cases]
        tables, done = {}, {}
        preempt_at = {index: case.preempt_at for index, case in enumerate(cases)}
        while len(tables) < len(cases) or any(done[i] < len(cases[i].tokens) for i in tables):
            for index, case in enumerate(cases):
                shared = max(case.hit_len, case.fork_len)
                if index not in tables and (not shared or done.get(case.parent, 0) >= shared):
                    tables[index], done[index] = self.table_for(case, tables.get(case.parent))
                    if shared:
                        found[index].append(torch.cat(found[case.parent])[:shared])
            rows, members = [], []
            for index, table in tables.items():
                tokens, start = cases[index].tokens, done[index]
                stop = min(start + chunk_size, preempt_at[index] or len(tokens))
                if start < stop:
                    rows.append(ScheduledRow(tokens[start:stop], start, table, WantLogits.ALL))
                    members.append(index)
            batch = build_batch(rows, self.block_size)
            logits = self.runner.forward(batch)
            for member, first, last in zip(members, batch.logit_start_loc[:-1], batch.logit_start_loc[1:], strict=True):
                found[member].append(logits[first:last])
                done[member] += int(last - first)
                if done[member] == preempt_at[member]:
                    tables[member] = np.array(self.take(len(tables[member])), dtype=np.int32)
                    done[member], found[member], preempt_at[member] = 0, [], None
        return [torch.cat(parts) for parts in found]
