"""`python -m tests.mutations [NAME…]`: breaks a copy of the source on purpose, place by place.

The tests that are named beside each place must fail then. Ends with 1 where a broken copy passed
them, where they fail without it, or where the text to be replaced is no longer there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_SOURCE = Path(__file__).parent.parent / "src"


class Mutation(NamedTuple):
    """What is broken, where, and which of tests/ must notice (node ids, separated by spaces)."""

    name: str
    file: str
    old: str
    new: str
    tests: str


_DIGEST = 'header.digest != _digest(header.file.metadata["facts"], tensors)'

MUTATIONS = (
    # What is on disk.
    Mutation(
        "a replaced file is not flushed",
        "base/files.py",
        "os.fsync(file.fileno())",
        "pass",
        "test_files.py",
    ),
    Mutation(
        "a training writes to whatever folder is at its path",
        "base/workspaces.py",
        "os.path.samestat(held[0].stat(), held[1])",
        "held[0].stat()",
        "test_training.py",
    ),
    Mutation(
        "a JSON file's hash is not compared",
        "base/files.py",
        'content.pop("sha256", None) != _json_hash(content)',
        'content.pop("sha256", None) is None',
        "test_files.py",
    ),
    Mutation(
        "a file's size is not looked at",
        "base/files.py",
        "size <= at_most:",
        "at_most:",
        "test_files.py",
    ),
    Mutation(
        "a document's own text can end it",
        "data/bins.py",
        "if not tokenizer.has_special(piece.text):",
        "if True:",
        "test_documents.py",
    ),
    Mutation(
        "documents are hashed without their ends",
        "data/splits.py",
        "if not piece.ends:",
        "if True:",
        "test_documents.py",
    ),
    Mutation(
        "a checkpoint's digest is not compared",
        "runs/checkpoint.py",
        _DIGEST,
        '"digest" not in metadata',
        "test_trials.py::test_a_short_trial_finds_no_failure[damage]",
    ),
    Mutation(
        "a tensor's type is not looked at",
        "runs/checkpoint.py",
        'found.dtype != "F32" or ',
        "",
        "test_checkpoint.py",
    ),
    Mutation(
        "a checkpoint's header is left in the order of chance",
        "runs/safetensors_file.py",
        "json.dumps(header, sort_keys=True,",
        "json.dumps(header,",
        "test_checkpoint.py",
    ),
    Mutation(
        "an index of tensors may name any path",
        "runs/hugging_face/read_weights.py",
        'if not re.fullmatch(r"[A-Za-z0-9][',
        'if not re.search(r"[A-Za-z0-9][',
        "test_import.py",
    ),
    Mutation(
        "a tokenizer is exported without being compared",
        "tokens/tokenizer_json.py",
        "    check_equal(tokenizer, made)\n    return made",
        "    return made",
        "test_export.py",
    ),
    Mutation(
        "GPT-2's matrices are not transposed",
        "experiments/export.py",
        "joined.T if stored.transposed",
        "joined if stored.transposed",
        "test_export.py",
    ),
    Mutation(
        "weights that are NaN are taken",
        "runs/checkpoint.py",
        "    check_finite(*weights.values())\n",
        "",
        "test_checkpoint.py",
    ),
    Mutation(
        "a line of metrics is believed",
        "runs/json_lines.py",
        'record.pop("crc32", None) == _checksum(record)',
        'record.pop("crc32", None) is not None',
        "test_training.py::test_metrics_with_a_changed_digit_or_a_lost_line_are_refused",
    ),
    Mutation(
        "what the ticker says of later steps is kept",
        "runs/run.py",
        """self._ticker.records() if line["step"] in steps]""",
        "self._ticker.records()]",
        "test_ticker.py",
    ),
    Mutation(
        "the ticker leaves dropout off",
        "experiments/snapshot.py",
        "model.train(training)",
        "pass",
        "test_ticker.py",
    ),
    Mutation(
        "a bin's hash is not compared",
        "data/dataset.py",
        "(file_hash if is_whole else sampled_hash)(path) != expected",
        "False",
        "test_dataset.py",
    ),
    Mutation(
        "a tokenizer's hash is not compared",
        "data/dataset.py",
        'file_hash(path / "tokenizer.json"), tokenizer.name',
        "meta.tokenizer_sha256, tokenizer.name",
        "test_dataset.py",
    ),
    Mutation(
        "ids are not compared with the vocabulary",
        "data/dataset.py",
        "ids_at(ids, slice(None), meta.vocab_size, str(path))",
        "pass",
        "test_dataset.py",
    ),
    Mutation(
        "heads are measured on ids that the vocabulary lacks",
        "see/heads.py",
        "ids_at(tokens, places_NT, run.vocab_size, origin)",
        "tokens[places_NT]",
        "test_dataset.py",
    ),
    Mutation(
        "any pattern is taken",
        "tokens/tokenizer.py",
        "!= pattern_of(found.name)",
        '== ""',
        "test_tokenizer.py::test_a_file_that_makes_no_tokenizer_is_refused",
    ),
    Mutation(
        "latest may lead anywhere",
        "base/folders.py",
        "if not is_safe_name(name) or not",
        "if not",
        "test_dataset.py",
    ),
    Mutation(
        "files are written under their final names",
        "base/files.py",
        "with naming(path), _temporary_beside(path) as temporary:",
        "with naming(path), contextlib.nullcontext(path) as temporary:",
        "test_trials.py::test_a_short_trial_finds_no_failure[kill]",
    ),
    Mutation(
        "a full disk does not say where metrics were appended",
        "runs/json_lines.py",
        "with files.naming(self.path), files.open_regular(",
        "with files.open_regular(",
        "test_training.py::test_a_disk_that_fills_up_is_told_with_the_file_and_the_last_step",
    ),
    Mutation(
        "a full disk is a fault of our own, as it is prepared",
        "base/files.py",
        "        raise  # of whoever listens to us\n    except OSError as error:",
        "        raise  # of whoever listens to us\n    except BlockingIOError as error:",
        "test_preparation.py::test_a_full_disk_is_one_line_and_the_old_data_stay",
    ),
    Mutation(
        "a full disk is a fault of our own, as it is trained",
        "training/loop.py",
        "        raise  # of whoever listens to us\n    except OSError as error:",
        "        raise  # of whoever listens to us\n    except BlockingIOError as error:",
        "test_training.py::test_a_disk_that_fills_up_is_told_with_the_file_and_the_last_step",
    ),
    Mutation(
        "a disk that fails as a folder is flushed is not noticed",
        "base/files.py",
        "if error.errno in _DISK_FAILS:",
        "if error.errno in ():",
        "test_files.py",
    ),
    Mutation(
        "a folder that can't take its place loses the old one",
        "base/workspaces.py",
        "        if not os.path.lexists(target):\n            aside.rename(target)\n        raise",
        "        raise",
        "test_preparation.py test_trials.py::test_a_short_trial_finds_no_failure[disk]",
    ),
    Mutation(
        "leftovers that are links are followed",
        "base/workspaces.py",
        "about = path.lstat()",
        "about = path.stat()",
        "test_leftovers.py",
    ),
    Mutation(
        "folders only seem to change places",
        "base/workspaces.py",
        "failed = libc.renameat2(here, paths[0], here, paths[1], swap)",
        "failed = 0",
        "test_preparation.py",
    ),
    # From text to ids.
    Mutation(
        "a text that changed is not noticed",
        "data/splits.py",
        "if digest.hexdigest() != self.sha256:",
        "if not digest:",
        "test_preparation.py::test_a_text_that_changes_meanwhile_is_refused",
    ),
    Mutation(
        "a byte order mark is kept",
        "text/text_files.py",
        'text.removeprefix("\\ufeff"), False',
        "text, False",
        "test_corpus.py",
    ),
    Mutation(
        "the split is one character late",
        "data/splits.py",
        "return math.floor(self.text.characters * (1 - fraction))",
        "return math.floor(self.text.characters * (1 - fraction)) + 1",
        "test_preparation.py::test_the_split_is_exact_to_the_character",
    ),
    Mutation(
        "bigrams are smoothed twice",
        "data/bins.py",
        "train.pair_counts + 1",
        "train.pair_counts + 2",
        "test_preparation.py::test_the_bigram_loss_is_that_of_counted_pairs",
    ),
    Mutation(
        "text is cut anywhere",
        "tokens/tokenizer.py",
        "[start + cut.end()] if cut else []",
        "[]",
        "test_tokenizer.py",
    ),
    Mutation(
        "a download's hash is not compared",
        "text/download.py",
        "if sha256 not in (None, digest.hexdigest()):",
        "if not digest:",
        "test_download.py::test_a_wrong_hash_is_refused",
    ),
    Mutation(
        "a wrong file from the network is kept",
        "text/download.py",
        "if sha256 not in (None, digest.hexdigest()):",
        "if not digest:",
        "test_trials.py::test_a_short_trial_finds_no_failure[network]",
    ),
    Mutation(
        "https may lead to http",
        "text/download.py",
        'if url.lower().startswith("https:") else',
        "if not url else",
        "test_download.py::test_https_is_checked_and_never_left_for_http",
    ),
    Mutation(
        "what is in the cache is believed",
        "text/download.py",
        "if folder and file_hash(folder / name) == sha256:",
        "if folder and (folder / name).is_file():",
        "test_download.py::test_a_damaged_copy_in_the_cache_is_fetched_again",
    ),
    # The model.
    Mutation(
        "the mask is shifted by one",
        "model/ops/attention.py",
        "tril(total - new)",
        "tril(total - new + 1)",
        "test_attention.py",
    ),
    Mutation(
        "the scale is 1/D",
        "model/attention.py",
        "(query.size(-1) ** -0.5 if scale is None else scale)",
        "(query.size(-1) ** -1.0 if scale is None else scale)",
        "test_textbook.py",
    ),
    Mutation(
        "rotary positions turn the wrong way",
        "model/ops/pointwise.py",
        "torch.cat((-second, first), dim=-1)",
        "torch.cat((second, -first), dim=-1)",
        "test_ops.py test_textbook.py",
    ),
    Mutation(
        "a norm in C forgets a part of its gradient",
        "compute/native/pointwise.c",
        "- a * share) * inverse",
        ") * inverse",
        "test_ops.py",
    ),
    Mutation(
        "attention in C sees the next key",
        "compute/native/attention.c",
        "(int32_t)(key - first)",
        "(int32_t)(key - first - 1)",
        "test_ops.py",
    ),
    Mutation(
        "a cache lies one token too early",
        "model/attention.py",
        "stored[..., start : self.length, :] = n",
        "stored[..., max(0, start - 1) : self.length - (start > 0), :] = n",
        "test_attention.py test_textbook.py",
    ),
    Mutation(
        "the residual stream is left out of the textbook",
        "model/textbook.py",
        'y = mlp(a, part(block, "mlp."), y)\n            x = x + y if a.residual else y',
        'y = mlp(a, part(block, "mlp."), y)\n            x = y',
        "test_textbook.py",
    ),
    Mutation(
        "the wrong head is silenced",
        "model/recorder.py",
        "mixed[..., self.silenced[1], :, :] = 0",
        "mixed[..., 0, :, :] = 0",
        "test_recorder.py",
    ),
    Mutation(
        "words in C end anywhere before whitespace",
        "compute/native/words.c",
        "(after == ' ' || ends == BEFORE_ANY_WHITESPACE)",
        "1",
        "test_words.py",
    ),
    Mutation(
        "new words in C stand beside each other without a filler",
        "compute/native/words.c",
        "n > known && !is_cut",
        "0 && !is_cut",
        "test_words.py",
    ),
    Mutation(
        "a token that reaches over two words is not noticed",
        "tokens/word_table.py",
        "np.array_equal(tokens_at[places], starts - starts[0])",
        "True",
        "test_words.py",
    ),
    Mutation(
        "compiled gradients of keys come from the queries before them",
        "compute/native/one_layer.c",
        "sum_queries(length, d_scores, q",
        "sum_keys(length, d_scores, q",
        "test_one_layer.py",
    ),
    Mutation(
        "compiled queries do not see their own token",
        "compute/native/decoding.c",
        "gather(size, position + 1,",
        "gather(size, position > 0 ? position : 1,",
        "test_native_decoder.py",
    ),
    Mutation(
        "grouped heads in C read the keys of the first group",
        "compute/native/decoding.c",
        "turned(m, packed + m->key_at + k * size,",
        "turned(m, packed + m->key_at,",
        "test_native_decoder.py",
    ),
    Mutation(
        "a crew leaves out the last panel of a product",
        "compute/native/products.h",
        "outputs = {panels.begin * PANEL, panels.end * PANEL};",
        "outputs = {panels.begin * PANEL, panels.end * PANEL - PANEL * (who.number > 1)};",
        "test_native_decoder.py",
    ),
    Mutation(
        "matrices that become panels are packed from their first rows",
        "compute/native/products.h",
        "map->rows + output;",
        "map->rows;",
        "test_native_decoder.py",
    ),
    Mutation(
        "a damaged library is loaded",
        "compute/native/build.py",
        "if is_ours and hashlib.sha256(library).digest() == content[:_DIGEST]:",
        "if is_ours:",
        "test_native_library.py",
    ),
    Mutation(
        "a compiled library is kept without its flags",
        "compute/native/build.py",
        "described = [command, str(compiler)",
        "described = [str(compiler)",
        "test_native_library.py",
    ),
    Mutation(
        "gradients of a one-layer rung overwrite those that are there",
        "training/one_layer.py",
        "d.head.addmm_(d_logits_VM, x_MC)",
        "torch.mm(d_logits_VM, x_MC, out=d.head)",
        "test_one_layer.py",
    ),
    Mutation(
        "a device that fails its trial is taken",
        "compute/device.py",
        "if problem is None:",
        'if problem != "not there":',
        "test_device.py",
    ),
    # Training.
    Mutation(
        "targets are the inputs",
        "data/batches.py",
        "return windows[:, :-1], windows[:, 1:]",
        "return windows[:, :-1], windows[:, :-1]",
        "test_batches.py",
    ),
    Mutation(
        "an epoch's order ignores the seed",
        "data/batches.py",
        "key = _hash(seed + turn, epoch)",
        "key = _hash(turn, epoch)",
        "test_batches.py",
    ),
    Mutation(
        "an epoch's order is the last one's",
        "data/batches.py",
        "key = _hash(seed + turn, epoch)",
        "key = _hash(seed + turn, 0 * epoch)",
        "test_batches.py",
    ),
    Mutation(
        "dropout is not seeded by step",
        "data/batches.py",
        "(np.uint64(step) << np.uint64(24)) + windows",
        "windows",
        "test_share.py",
    ),
    Mutation(
        "dropout is not seeded",
        "training/share.py",
        "generator.manual_seed(seed)",
        "pass",
        "test_share.py",
    ),
    Mutation(
        "gradients of threads are added, not averaged",
        "training/optimizer.py",
        "self.gradient.mul_(1 / pieces)",
        "pass",
        "test_share.py",
    ),
    Mutation(
        "more windows at once than asked for",
        "training/share.py",
        "range(-(-rows // most), rows + 1)",
        "range(max(1, rows // most), rows + 1)",
        "test_share.py",
    ),
    Mutation(
        "all processes drop the same in their windows",
        "training/step.py",
        "self._first + begin, *windows",
        "begin, *windows",
        "test_processes.py",
    ),
    Mutation(
        "the gradients of a sharded model's pieces are added, not averaged",
        "training/step.py",
        "cut.pieces if state.optimizer.sums_gradients else cut.rounds * cut.shares",
        "1",
        "test_processes.py",
    ),
    Mutation(
        "each process clips by the norm of its own rows",
        "training/sharding.py",
        'self._processes.add_up(square, "a step")',
        "pass",
        "test_processes.py",
    ),
    Mutation(
        "Muon makes rows orthogonal, not whole matrices",
        "training/sharding.py",
        "self._config, place.shape, orthogonalized)",
        "self._config, place.shape)",
        "test_processes.py",
    ),
    Mutation(
        "what is computed again drops other numbers",
        "model/layers.py",
        "restore(states)\n        yield",
        "yield",
        "test_sharding.py",
    ),
    Mutation(
        "rows of a sharded checkpoint may be missing",
        "runs/sharded_checkpoint.py",
        "if [part.first for part in parts] + [whole[0]] != [0] + [part.end for part in parts]:",
        "if False:",
        "test_sharding.py",
    ),
    Mutation(
        "the hashes of a sharded checkpoint's files are not compared",
        "runs/sharded_checkpoint.py",
        "files.file_hash(path / name) != digest",
        "False",
        "test_sharding.py",
    ),
    Mutation(
        "a process stops by itself",
        "training/step.py",
        "self.stop.agree()",
        "pass",
        "test_processes.py",
    ),
    Mutation(
        "each process has its own validation loss",
        "training/validation.py",
        'processes.add_up(sums, "an evaluation")',
        "pass",
        "test_processes.py",
    ),
    Mutation(
        "all processes say the same error",
        "compute/processes.py",
        ".result(_STORE_ANSWERS) == 1",
        ".result(_STORE_ANSWERS) >= 1",
        "test_processes.py::test_each_machine_says_once_why_all_end",
    ),
    Mutation(
        "what others are waited for does not depend on our own share",
        "compute/processes.py",
        "max(ours, theirs)",
        "theirs",
        "test_processes.py::test_how_long_others_are_waited_for",
    ),
    Mutation(
        "a loss in pieces keeps the gradient of the last one alone",
        "model/ops/loss.py",
        "d_head_VC += d_logits_mV.T @ x_MC[part]",
        "d_head_VC.copy_(d_logits_mV.T @ x_MC[part])",
        "test_ops.py",
    ),
    Mutation(
        "norms decay",
        "training/update_rules.py",
        "decays = parameter.ndim > 1 or",
        "decays = parameter.ndim > 0 or",
        "test_optimizer.py",
    ),
    Mutation(
        "AdamW forgets which step it makes",
        "training/update_rules.py",
        "self._made[0].fill_(step + 1)",
        "self._made[0].fill_(1)",
        "test_optimizer.py",
    ),
    Mutation(
        "a linear schedule is a cosine",
        "training/schedule.py",
        'height = left if config.schedule == "linear" else',
        'height = left if config.schedule == "" else',
        "test_optimizer.py",
    ),
    Mutation(
        "the clock of a budget leaves no time for the last evaluation",
        "training/schedule.py",
        "left = self.ends - self.closing - now",
        "left = self.ends - now",
        "test_budget.py::test_evaluations_that_take_long_are_fewer",
    ),
    Mutation(
        "a resumed run starts its budget anew",
        "experiments/train.py",
        "Clock.of((1 - state.progress) * budget, began)",
        "Clock.of(budget, began)",
        "test_budget.py::test_a_run_that_is_resumed_continues_the_clock",
    ),
    Mutation(
        "Muon's momentum is not Nesterov's",
        "training/update_rules.py",
        "direction = self._gradient.lerp(self._mean, self._momentum)",
        "direction = self._mean.clone()",
        "test_optimizer.py",
    ),
    Mutation(
        "resuming forgets the mean gradient",
        "training/optimizer.py",
        "view.copy_(tensors[name])",
        'view.copy_(tensors[name]) if name.endswith("square") else None',
        "test_optimizer.py",
    ),
    Mutation(
        "a signal saves nothing",
        "training/loop.py",
        "self._saver.save()\n        self._saver.finish()",
        "self._saver.finish()",
        "test_training.py::test_stopping_between_evaluations_keeps_the_last_complete_step",
    ),
    Mutation(
        "what was evaluated is noted too late",
        "training/state.py",
        "self.evaluated_step, self.loss_sum = self.step, 0.0",
        "self.loss_sum = 0.0",
        "test_training.py",
    ),
    Mutation(
        "what can't fit into memory is begun",
        "training/memory.py",
        "if there is None or estimate.total <= FACTOR * there:",
        "if there is None or estimate.total:",
        "test_memory.py",
    ),
    Mutation(
        "a signal whose exception was kept is forgotten",
        "cli/exits.py",
        "timer.start()",
        "pass",
        "test_interruption.py",
    ),
    Mutation(
        "what Python dropped is shown",
        "cli/exits.py",
        "if isinstance(dropped.exc_value, Interrupted):",
        "if dropped.exc_value is None:",
        "test_interruption.py",
    ),
    Mutation(
        "a second signal waits for whoever is busy",
        "base/signals.py",
        "            at_second_signal(signum, frame)",
        "            pass",
        "test_interruption.py",
    ),
    Mutation(
        "an evaluation goes on after a signal",
        "training/validation.py",
        "if stop is not None and stop.has_come:",
        "if stop is None:",
        "test_interruption.py",
    ),
    Mutation(
        "a signal that comes as a training ends is forgotten",
        "base/signals.py",
        "            yield\n        if self.signum is not None:",
        "            yield\n        if self.raises:",
        "test_interruption.py",
    ),
    Mutation(
        "locks are ignored",
        "base/workspaces.py",
        "fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))",
        "pass",
        "test_trials.py::test_a_short_trial_finds_no_failure[two]",
    ),
    Mutation(
        "the best is the newest",
        "training/loop.py",
        "improved = evaluation.loss < state.best_loss",
        "improved = True",
        "test_training.py",
    ),
    Mutation(
        "evaluation drops the last window",
        "training/validation.py",
        "if len(rest) > 1:",
        "if len(rest) > model.architecture.block_size:",
        "test_training.py::test_evaluation_is_over_the_whole_split_token_by_token",
    ),
    Mutation(
        "bits are nats",
        "training/validation.py",
        "loss / math.log(2) / bytes_per_token",
        "loss / bytes_per_token",
        "test_training.py::test_metrics_have_what_the_design_says",
    ),
    Mutation(
        "the gradient of GELU in C is wrong by one percent",
        "compute/native/pointwise.c",
        "store_some(d_x + i, slope * some_of(grad + i, count - i), count - i);",
        "store_some(d_x + i, 1.01f * slope * some_of(grad + i, count - i), count - i);",
        "test_ops.py::test_compiled_forms_of_odd_sizes",
    ),
    Mutation(
        "the gradient of keys in C is wrong by one percent",
        "compute/native/attention.c",
        "scatter(d_keys, place_of(d_k, window, kv_head, 0), d_k->token, length, size, 1);",
        "scatter(d_keys, place_of(d_k, window, kv_head, 0), d_k->token, length, size, 1.01f);",
        "test_ops.py::test_attention_in_c_is_attention",
    ),
    # Sampling.
    Mutation(
        "temperature is not applied",
        "generation/next_token.py",
        "logits_BV /= temperature",
        "pass",
        "test_sampling.py",
    ),
    Mutation(
        "a token is chosen by logits that are NaN",
        "generation/next_token.py",
        "if not math.isfinite(np.add.reduce(logits_BV, None)):",
        "if False:",
        "test_sampling.py",
    ),
    Mutation(
        "top-k keeps one too few",
        "generation/next_token.py",
        "np.argpartition(logits_BV, -top_k, axis=-1)[:, :-top_k]",
        "np.argpartition(logits_BV, 1 - top_k, axis=-1)[:, : 1 - top_k]",
        "test_sampling.py",
    ),
    Mutation(
        "top-p keeps one too few",
        "generation/next_token.py",
        "ordered_BV.cumsum(-1) - ordered_BV < top_p",
        "ordered_BV.cumsum(-1) < top_p",
        "test_sampling.py",
    ),
    Mutation(
        "the window never moves by half",
        "generation/native_decoder.py",
        "else max(1, a.block_size // 2)",
        "else a.block_size",
        "test_sampling.py",
    ),
    # What is typed.
    Mutation(
        "settings that a rung lacks are ignored",
        "model/architecture.py",
        "if name not in preset.settings:",
        "if False:",
        "test_settings.py",
    ),
    Mutation(
        "a recipe that can't be parsed is our own fault",
        "config/recipes.py",
        "except (ValueError, RecursionError) as error:",
        "except RecursionError as error:",
        "test_trials.py::test_a_short_trial_finds_no_failure[input]",
    ),
    Mutation(
        "a run that lies elsewhere is removed",
        "runs/remove.py",
        "or not is_there:",
        "or False:",
        "test_list.py::test_nothing_elsewhere_is_removed",
    ),
    Mutation(
        "the latest is a run that was removed",
        "runs/remove.py",
        "if latest_name(parent) != removed:",
        "if True:",
        "test_list.py::test_a_run_is_removed_after_a_question_only",
    ),
    Mutation(
        "what lies there and is no run stops the list",
        "runs/list_runs.py",
        "    except AttnlmError as error:\n        return replace",
        "    except KeyError as error:\n        return replace",
        "test_list.py::test_whatever_else_lies_there_stops_no_list",
    ),
    Mutation(
        "names that a shell takes apart are completed",
        "cli/completion.py",
        " and _PLAIN.fullmatch(word)]",
        "]",
        "test_completion.py::test_what_may_follow_is_completed",
    ),
    Mutation(
        "a reader that leaves is an error",
        "cli/exits.py",
        "except BrokenPipeError:",
        "except BlockingIOError:",
        "test_cli.py::test_a_reader_that_leaves_early_is_no_error",
    ),
    # Subnormal numbers.
    Mutation(
        "a training does not flush subnormal numbers",
        "compute/choices.py",
        "with flushing_subnormals():",
        "with contextlib.nullcontext():",
        "test_subnormals.py",
    ),
    Mutation(
        "the thread pool of PyTorch keeps its mode",
        "compute/threads.py",
        ".omp_pause_resource_all(_SOFT_PAUSE)",
        "",
        "test_subnormals.py",
    ),
    Mutation(
        "threads of a pool do not take the mode of the calling thread",
        "compute/threads.py",
        "torch.set_flush_denormal(flush)",
        "pass",
        "test_subnormals.py",
    ),
    Mutation(
        "sampling does not flush subnormal numbers",
        "generation/sampling.py",
        ", FlushingHere():",
        ":",
        "test_subnormals.py",
    ),
    Mutation(
        "the threads that sum gradients of processes do not flush subnormal numbers",
        "compute/processes.py",
        "with FlushingHere():",
        "with contextlib.nullcontext():",
        "test_processes.py::test_processes_compute_what_one_does",
    ),
)


def main() -> int:
    """Returns 1 unless every mutation was caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations")
    names = [mutation.name for mutation in MUTATIONS]
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[[], *names])
    chosen = parser.parse_args().names or names
    mutations = [mutation for mutation in MUTATIONS if mutation.name in chosen]
    if wrong := outdated(mutations):
        print("\n".join(wrong))
        return 1
    if _pytest(sorted({test for mutation in mutations for test in mutation.tests.split()})) != 0:
        print("these tests fail anyway: nothing can be said")
        return 1
    failed = False
    print("| broken on purpose | outcome | seconds |")
    print("| --- | --- | ---: |", flush=True)
    for mutation in mutations:
        began = time.perf_counter()
        code = _pytest(mutation.tests.split(), mutation)
        outcome = {0: "SURVIVED", 1: "caught"}.get(code, f"pytest ended with {code}")
        failed |= outcome != "caught"
        seconds = time.perf_counter() - began
        print(f"| {mutation.name} | {outcome} | {seconds:.0f} |", flush=True)
    return int(failed)


def outdated(mutations: Sequence[Mutation]) -> list[str]:
    """What no longer fits the source: a text that isn't there exactly once, a test that is gone."""
    wrong = []
    for mutation in mutations:
        path = _SOURCE / "attnlm" / mutation.file
        count = path.read_text(encoding="utf-8").count(mutation.old) if path.is_file() else 0
        if count != 1:
            wrong.append(f"{mutation.name}: {mutation.file} has {count} times {mutation.old!r}")
        for test in mutation.tests.split():
            file, _, function = test.partition("::")
            path = Path(__file__).parent / file
            named = f"def {function.partition('[')[0]}"
            if not path.is_file() or named not in path.read_text(encoding="utf-8"):
                wrong.append(f"{mutation.name}: there is no {test}")
    return wrong


def _pytest(tests: list[str], mutation: Mutation | None = None) -> int:
    """The exit code of these tests on a copy of the source, broken as the mutation says."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(_SOURCE, source, ignore=shutil.ignore_patterns("__pycache__"))
        if mutation is not None:
            path = source / "attnlm" / mutation.file
            text = path.read_text(encoding="utf-8")
            path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
        options = ["-x", "-q", "-p", "no:cacheprovider"]
        return subprocess.run(
            [sys.executable, "-m", "pytest", *options, *(f"tests/{test}" for test in tests)],
            cwd=_SOURCE.parent,
            env={**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ).returncode


if __name__ == "__main__":
    raise SystemExit(main())
