"""A runner on a plain tensor, with block tables made by hand: what the cache service will do, without one."""

import dataclasses

import numpy as np
import torch

from kvkeeper.engine_service.compute.model_runner import ModelRunner, make_kv_layout
from kvkeeper.engine_service.compute.stored_model import has_states, kv_groups, state_groups
from kvkeeper.engine_service.model.decoder import Decoder
from tests.support.models.tiny_models import NumericsCase
from tests.support.worlds.batches import ScheduledRow, WantLogits, build_batch


class HandTables:
    """Computes the cases of a model on an arena that is NaN wherever nothing was written, with shuffled block ids.

    Recurrent groups have a page of each checkpoint and of the last entry alone. A hit or a fork ends at a checkpoint there.
    Other groups have as many blocks as the first.
    """

    def __init__(self, model, block_size, num_blocks=1600, fill=float("nan"), checkpoint_blocks=1):
        self.block_size = block_size
        is_recurrent = isinstance(model, Decoder) and has_states(model.config)
        groups = state_groups(model, block_size, checkpoint_blocks) if is_recurrent else ()
        if isinstance(model, Decoder) and model.config.layer_heads:
            groups = kv_groups(model.config)
        self.checkpoint_blocks, self.num_more_groups = checkpoint_blocks, max(len(groups) - 1, 0)
        self.num_state_groups = self.num_more_groups if is_recurrent else 0
        layout = make_kv_layout(model.config, model.dtype, block_size, groups)
        self.view = layout.view(torch.zeros(num_blocks * layout.block_bytes, dtype=torch.uint8)).fill_(fill)
        self.fill = fill
        self.runner = ModelRunner(model, self.view, layout, groups)
        self.free = (np.random.default_rng(0).permutation(num_blocks - 1) + 1).tolist()
        self.num_copies = 0

    def take(self, num_blocks):
        return [self.free.pop() for _ in range(num_blocks)]

    def table_for(self, case: NumericsCase, parent_tables):
        """The tables that the case starts with, [groups, blocks], and how many of its tokens are in the cache already."""
        shared = max(case.hit_len, case.fork_len)
        if self.num_state_groups:
            shared -= shared % (self.checkpoint_blocks * self.block_size)
        tables = np.zeros((1 + self.num_more_groups, -(-len(case.tokens) // self.block_size)), np.int32)
        num_shared = -(-shared // self.block_size)
        for group in range(1 + self.num_more_groups - self.num_state_groups):
            table = list(parent_tables[group, :num_shared]) if shared else []
            if shared % self.block_size:  # copy-on-write of the partial tail
                (own,) = self.take(1)
                self.runner.copy_blocks([(table[-1], own)])
                table[-1] = own
                self.num_copies += group == 0
            tables[group] = table + self.take(tables.shape[1] - len(table))
        if shared and self.num_state_groups:
            tables[1:, num_shared - 1] = parent_tables[1:, num_shared - 1]
        return tables, shared

    def grant_states(self, tables, first, end):
        """Pages for a step that computes tokens [first, end): of the checkpoints, and of the last entry."""
        if not self.num_state_groups:
            return
        for entry in range(first // self.block_size, (end - 1) // self.block_size + 1):
            if self.is_checkpoint(entry) or entry == (end - 1) // self.block_size:
                for table in tables[1:]:
                    table[entry] = table[entry] or self.take(1)[0]

    def take_back_states(self, tables, first, end):
        """The page that a step on tokens [first, end) has read, where it is no checkpoint and the state is in another."""
        entry = (first - 1) // self.block_size
        if self.num_state_groups and first and entry < (end - 1) // self.block_size and not self.is_checkpoint(entry):
            for table in tables[1:]:
                self.view[table[entry]] = self.fill
                self.free.append(int(table[entry]))
                table[entry] = 0

    def is_checkpoint(self, entry):
        return (entry + 1) % self.checkpoint_blocks == 0

    def batch_of(self, rows, tables):
        """rows with the tables of their groups."""
        batch = build_batch(rows, self.block_size)
        if not self.num_more_groups:
            return batch
        width = batch.block_tables.shape[1]
        group_tables = np.zeros((len(rows), self.num_more_groups, width), np.int32)
        for of_row, own in zip(group_tables, tables, strict=True):
            of_row[:, : own.shape[1]] = own[1:, :width]
        row_of_token = np.repeat(np.arange(len(rows)), np.diff(batch.query_start_loc))
        blocks, offsets = np.divmod(batch.positions, self.block_size)
        slots = group_tables[row_of_token, :, blocks].T.astype(np.int64) * self.block_size + offsets
        return dataclasses.replace(batch, group_tables=group_tables, group_slots=slots)

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
                    if done[index]:
                        found[index].append(torch.cat(found[case.parent])[: done[index]])
            rows, members = [], []
            for index, own in tables.items():
                tokens, start = cases[index].tokens, done[index]
                stop = min(start + chunk_size, preempt_at[index] or len(tokens))
                if start < stop:
                    self.grant_states(own, start, stop)
                    rows.append(ScheduledRow(tokens[start:stop], start, own[0], WantLogits.ALL))
                    members.append(index)
            batch = self.batch_of(rows, [tables[member] for member in members])
            logits = self.runner.forward(batch)
            for member, first, last in zip(members, batch.logit_start_loc[:-1], batch.logit_start_loc[1:], strict=True):
                found[member].append(logits[first:last].clone())  # the next step may use their memory
                self.take_back_states(tables[member], done[member], done[member] + int(last - first))
                done[member] += int(last - first)
                if done[member] == preempt_at[member]:
                    tables[member] = self.table_for(NumericsCase(cases[member].tokens), None)[0]
                    done[member], found[member], preempt_at[member] = 0, [], None
        return [torch.cat(parts) for parts in found]
