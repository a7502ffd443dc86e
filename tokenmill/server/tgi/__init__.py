"""The dialect of Text Generation Inference (TGI), as `huggingface_hub` speaks it."""
