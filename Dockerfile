# An image of the library and its recipes, for scripts/launch and any other scheduler.
#
#     docker build --build-arg EXTRAS=cuda,train,text,tools -t zoo:cuda .
#     docker build --build-arg EXTRAS=tpu,train,text,tools -t zoo:tpu .
#
# EXTRAS are those of pyproject.toml: cuda brings CUDA, cuDNN and NCCL as packages, so that the host gives its driver
# alone; tpu brings libtpu. Without either, JAX runs on CPUs.
FROM python:3.12-slim

ARG EXTRAS=train,text,tools

RUN useradd --create-home zoo
WORKDIR /zoo

# gcsfs reads and writes gs:// (--checkpoint-url).
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY zoo zoo
COPY recipes recipes
RUN pip install --no-cache-dir -c constraints.txt ".[${EXTRAS}]" gcsfs

# The folder of runs; mount a volume over it.
RUN mkdir runs && chown zoo runs
USER zoo

CMD ["python", "recipes/transformer.py"]
