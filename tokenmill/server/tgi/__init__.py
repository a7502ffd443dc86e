"""The dialect of Text Generation Inference (TGI), as used by `huggingface_hub`."""
