"""
qwen.py: what is Qwen2.5-VL's alone: pictures, pads, positions, forbidden tokens, loading.

Concept     A Policy is a model of Hugging Face's with its tokenizer and its image processor. All
            that is peculiar to Qwen2.5-VL stands here, and nothing of the game. Another model is
            another such file, with `load`, `freeze_vision` and a Policy of the same methods.
Paper       nothing: CodeV starts from Qwen2.5-VL-7B-Instruct
In          a checkpoint folder or a hub name
Out         a Policy
Left out    videos; other models, which `load` refuses
Read next   rollout.py (the game that a Policy plays), processes.py (one Policy, many processes)
"""

import os
import re
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoTokenizer, GenerationConfig
from transformers import Qwen2_5_VLForConditionalGeneration as Model
from transformers import Qwen2VLImageProcessorPil as ImageProcessor

CHECKPOINT = (
    "expected a folder with config.json, model.safetensors, tokenizer.json and "
    "preprocessor_config.json, such as the sft/ and rl/ of a run, or a hub name within reach"
)

CACHE_SHARE = 0.7  # of free memory, for the KV cache; a layer is copied while it is attended to


class Picture(NamedTuple):
    """One image as the model takes it: a film of 2 equal frames, cut into patches."""

    pixels: Tensor  # [patches, channels * 2 * patch * patch]
    grid: Tensor  # [3] time, rows and columns of patches


class Encoded(NamedTuple):
    """A piece of history that the policy did not choose."""

    ids: list[int]
    pictures: list[Picture]


@lru_cache(4)  # the layers of one forward know two ways to cut, and ask for them in turn
def by_length(bounds: tuple[int, ...], device: torch.device) -> tuple[list[Tensor], Tensor]:
    """Windows begin and end at bounds. Returns the patches of all windows of one length as
    [windows, length], for each length; and where each patch stands in all of these together."""
    alike: dict[int, list[range]] = {}
    for begin, end in zip(bounds, bounds[1:]):
        alike.setdefault(end - begin, []).append(range(begin, end))
    patches = [torch.tensor([*map(list, windows)]).to(device) for windows in alike.values()]
    return patches, torch.cat([p.flatten() for p in patches]).argsort()


def attend_in_windows(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None,
    scaling: float, cu_seq_lens_q: Tensor, **others: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention of the vision tower: a patch sees its window; in four of 32 layers, its picture.
    transformers makes a call for each window, 130 for a photo. One call can take all windows of a
    length, and few lengths occur: most windows are whole, and the edges cut the others. Exact.
    [1, heads, patches, width] -> [1, patches, heads, width]. cu_seq_lens_q: the bounds."""
    patches, place = by_length(tuple(cu_seq_lens_q.tolist()), query.device)
    seen = []
    for at in patches:  # [windows, n]
        q, k, v = (x[0][:, at].transpose(0, 1) for x in (query, key, value))  # [windows, heads, n,]
        of_windows = scaled_dot_product_attention(q, k, v, scale=scaling)
        seen.append(of_windows.transpose(1, 2).flatten(0, 1))  # [windows * n, heads, width]
    return torch.cat(seen)[place][None], None


# A name with "flash" in it is what the model takes for one that cuts the patches itself.
AttentionInterface.register("flash_in_windows", attend_in_windows)


class Policy:
    """A vision-language model with its tokenizer and image processor: pi_theta. tags: the
    words of the game that stand in angle brackets, and whether the policy may write them."""

    sharded: nn.Module | None = None  # processes.shard puts one here
    base: "Policy | None" = None  # of adapter.Adapted: the same policy without its adapter

    def __init__(self, model: nn.Module, tokenizer, image_processor, tags: dict[str, bool]) -> None:
        self.model, self.tokenizer, self.image_processor = model, tokenizer, image_processor
        vocabulary = tokenizer.get_vocab()
        for token in ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>"):
            if token not in vocabulary:
                raise ValueError(f"expected a Qwen2.5-VL tokenizer; this one has no {token}")
        if (pad := vocabulary["<|image_pad|>"]) != (own := model.config.image_token_id):
            raise ValueError(f"<|image_pad|> is token {pad}, but the model's is {own}: not a pair")
        self.image_id, self.end_id = pad, vocabulary["<|im_end|>"]
        self.pad_id = tokenizer.pad_token_id
        model.model.visual.config._attn_implementation = "flash_in_windows"
        # The policy must not sample control tokens, which would forge a turn or an image (it may
        # end its own message), nor ids beyond the tokenizer's: the embedding has spare rows.
        marks = {f"<{slash}{tag}>": may for tag, may in tags.items() for slash in ("", "/")}
        added, may_write = tokenizer.get_added_vocab(), marks | {"<|im_end|>": True}
        control = {id for token, id in added.items() if not may_write.get(token)}
        spare = range(len(tokenizer), model.config.text_config.vocab_size)
        self.forbidden = sorted({*control, *spare})
        if self.pad_id not in self.forbidden:
            raise ValueError(f"the pad token {tokenizer.pad_token!r} must be a control token")
        # Text from elsewhere may hold no control token and no tag, however it is tokenised.
        longest_first = sorted({*added, *marks}, key=len, reverse=True)
        self._reserved = re.compile("|".join(map(re.escape, longest_first)))

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def layers(self) -> list[nn.Module]:
        """The parts of the model that `processes.shard` cuts one by one."""
        inner = self.model.model
        return [*inner.visual.blocks, *inner.language_model.layers]

    def checkpoint_activations(self) -> None:
        """Compute activations again in the backward pass, in place of keeping them. transformers
        then asks for gradients of embedded tokens and patches, which its newer checkpoints do not
        need: they would lead the backward pass through a frozen vision tower."""
        self.model.activation_checkpointing_enable()
        self.model.disable_input_require_grads()

    def neutralise(self, text: str) -> str:
        """Break every control token and tag in text that the policy did not write, so that a
        log cannot forge a turn, an image or an answer: "<|im_end|>" becomes "‹|im_end|>"."""
        return self._reserved.sub(lambda match: "‹" + match[0][1:], text)

    def user_turn(self, text: str, closed: bool) -> str:
        """A message of the user behind the policy's, and the header of the reply to it.
        closed: the policy has ended its message itself, so that we need not."""
        end = "" if closed else "<|im_end|>"
        return f"{end}\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"

    def pictures(self, images: list[Image.Image]) -> list[Picture]:
        """The pixel budget is the image processor's, for acting, learning and lengths alike."""
        if not images:
            return []
        batch = self.image_processor(images=images, return_tensors="pt")
        grids = batch["image_grid_thw"]
        return [*map(Picture, batch["pixel_values"].split(grids.prod(-1).tolist()), grids)]

    def outline(self, image: Image.Image) -> Picture:
        """A picture without its pixels: enough to count tokens, and a thousand times faster."""
        patches = self.image_processor.get_number_of_image_patches(image.height, image.width)
        return Picture(torch.empty(0), torch.tensor([1, 1, patches]))

    def encode(self, text: str, pictures: list[Picture]) -> Encoded:
        """Tokens of trusted text. Its i-th <|image_pad|> becomes as many pads as picture i has
        visual tokens."""
        first, *rest = text.split("<|image_pad|>")
        if len(rest) != len(pictures):
            raise ValueError(f"{len(rest)} image places in a text with {len(pictures)} images")
        visual = [int(p.grid.prod()) // self.image_processor.merge_size**2 for p in pictures]
        text = first + "".join("<|image_pad|>" * n + part for n, part in zip(visual, rest))
        return Encoded(self.tokenizer(text, add_special_tokens=False)["input_ids"], pictures)

    def positions(self, ids: Tensor, mask: Tensor, grids: list[Tensor]) -> Tensor:
        """[B, L] ids and mask -> [4, B, L]: a token's number, which generate needs, and its
        time, row and column for multimodal RoPE. grids: of every image of every row, in order.
        Slots with mask 0 take no position, wherever they are. Left to itself the model takes
        positions from whatever it saw last, which is silently wrong with a kept cache."""
        ids, mask = ids.cpu(), mask.cpu()  # get_rope_index loops in Python
        rope, _ = self.model.model.get_rope_index(
            ids,
            mm_token_type_ids=(ids == self.image_id).int(),
            image_grid_thw=torch.stack(grids) if grids else None,
            attention_mask=mask,
        )
        text = (mask.cumsum(-1) - 1).clamp(min=0)
        return torch.cat([text[None], rope]).to(self.device)

    def model_images(self, pictures: list[Picture]) -> dict[str, Tensor]:
        """The keyword arguments of a forward that encodes these pictures; {} for none."""
        if not pictures:
            return {}
        pixels, grids = zip(*pictures)
        pixels, grids = torch.cat(pixels).to(self.device), torch.stack(grids).to(self.device)
        return {"pixel_values": pixels, "image_grid_thw": grids}

    def generate(self, max_new_tokens: int, **inputs) -> Tensor:
        """input_ids [B, L] and other arguments of a forward or of `generate` -> [B, L + new]:
        the token of the highest score each time, so that a logits_processor can be the
        sampler. Pads stand behind a row that stopped early."""
        config = GenerationConfig(
            suppress_tokens=self.forbidden, max_new_tokens=max_new_tokens,
            pad_token_id=self.pad_id, eos_token_id=self.end_id,
        )  # fmt: skip
        # What config leaves open is filled from the model's own, where released checkpoints have
        # near-greedy values and a repetition penalty. Only an export needs the model's own.
        own, self.model.generation_config = self.model.generation_config, GenerationConfig()
        ids = self.model.generate(generation_config=config, synced_gpus=False, **inputs)
        self.model.generation_config = own
        return ids

    def rows_that_fit(self, length: int, budget_gb: float) -> int:
        """How many rows of `length` slots a KV cache of budget_gb has room for: keys and values of
        every layer, 115 kB a slot for the 7B in fp32. 0: a share of the memory that is free now."""
        c = self.model.config.text_config
        width = c.hidden_size // c.num_attention_heads * c.num_key_value_heads
        slot = 2 * c.num_hidden_layers * width * self.model.dtype.itemsize
        if budget_gb:
            budget = budget_gb * 1e9
        elif self.device.type == "cuda":
            torch.cuda.empty_cache()  # what the last step has freed is free
            budget = CACHE_SHARE * torch.cuda.mem_get_info(self.device)[0]
        else:
            budget = CACHE_SHARE * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return int(budget // (slot * length))

    def version(self) -> str:
        """A hash of all that decides which tokens a prompt, with its pictures, becomes."""
        tokenizer = self.tokenizer.backend_tokenizer.to_str() + str(self.tokenizer.chat_template)
        return sha256((tokenizer + self.image_processor.to_json_string()).encode()).hexdigest()

    def save(self, folder: str | Path) -> None:
        """A plain Hugging Face checkpoint, which `load`, transformers and others can read."""
        for part in (self.model, self.tokenizer, self.image_processor):
            part.save_pretrained(folder)
        for file in Path(folder).iterdir():
            file.chmod(0o644)  # safetensors lets nobody else read its own


def check_checkpoint(name: str | Path) -> None:
    """Refuse early what cannot be a checkpoint: neither a folder with one nor a hub name."""
    config = Path(name) / "config.json"
    folder_like = Path(name).exists() or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(name))
    if folder_like and not (config.is_file() and "model_type" in config.read_text()):
        raise FileNotFoundError(f"no checkpoint in {name}: {CHECKPOINT}")


def load(
    tags: dict[str, bool], name: str | Path, device: str | torch.device = "cpu",
    max_pixels: int | None = None, weights: bool = True,
) -> Policy:  # fmt: skip
    """A folder or a hub name -> Policy. The tiny model and the 7B take the same path.
    Weights are fp32 whatever they were saved in: an update of 1e-6 is lost in bf16. max_pixels is
    the budget of any image, saved with every export; None keeps the checkpoint's own. weights=False
    gives the architecture alone, on the meta device: enough to count tokens and parameters."""
    check_checkpoint(name)
    try:
        kind = Model.config_class.get_config_dict(name)[0].get("model_type")
        if kind != "qwen2_5_vl":
            raise ValueError(f"expected a checkpoint of type 'qwen2_5_vl': {name} is {kind!r}")
        tokenizer = AutoTokenizer.from_pretrained(name)
        image_processor = ImageProcessor.from_pretrained(name)
        if weights:
            how = dict(dtype=torch.float32, attn_implementation="sdpa", output_loading_info=True)
            model, loading = Model.from_pretrained(name, **how)
            if missing := sorted(loading["missing_keys"]):
                raise ValueError(f"{name} lacks {len(missing)} weights, such as {missing[0]}")
            model = model.to(device)
        else:
            with torch.device("meta"):
                model = Model(Model.config_class.from_pretrained(name))
    except OSError as error:
        why = str(error).splitlines()[0]
        raise FileNotFoundError(f"no model {str(name)!r} ({why}): {CHECKPOINT}") from error
    if max_pixels is not None:
        if max_pixels < (token := (image_processor.patch_size * image_processor.merge_size) ** 2):
            raise ValueError(f"--max-pixels {max_pixels}: one visual token takes {token} pixels")
        least = min(image_processor.size["shortest_edge"], max_pixels)  # an area, despite its name
        image_processor.size = {"shortest_edge": least, "longest_edge": max_pixels}
    return Policy(model.eval(), tokenizer, image_processor, tags)


def freeze_vision(policy: Policy) -> None:
    """The vision tower gets no gradient and no optimiser state, nor does its projector to the text
    model (Thyme freezes the tower; the projector is our reading). Before the optimiser is made."""
    policy.model.model.visual.requires_grad_(False)
