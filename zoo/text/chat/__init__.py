"""Chat templates: the Jinja program of a checkpoint that turns messages into the text that its model was trained on.

    from zoo.text import ChatTemplate, encode_conversation

    template = ChatTemplate.read(directory)
    messages = [{"role": "user", "content": "What is a pytree?"}]
    tokens = template.encode(messages, tokenizer, add_generation_prompt=True)
    ((tokens, mask),) = encode_conversation(template, answered, tokenizer)  # to train on where the mask is True

Special tokens that a message spells are plain text: no user ends the turn of another by typing `<|im_end|>`.
"""
