"""A Llama of 8B parameters, as the engines beside this file read it."""

SIZES = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
SIZES |= {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192}
MODEL = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SIZES, "bos_token_id": 1, "eos_token_id": 2}
