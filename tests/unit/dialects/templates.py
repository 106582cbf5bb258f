"""Chat templates of the kinds that models have, in short: what they write around answers, which thoughts they keep."""

from __future__ import annotations

from tests.unit.dialects.outputs import THOUGHTS, tokenizer
from zjournal.checkpoint.template import Template
from zjournal.checkpoint.tokenizer import Tokenizer

TURNS = ("<|im_start|>", "<|im_end|>")

_TOOLS = (
    "{% if tools %}<|im_start|>system\n# Tools\n<tools>{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n</tools>"
    "<|im_end|>\n{% endif %}"
)

# Thoughts behind the last user message only; an empty pair in the last message, if it is an answer.
QWEN = Template(
    _TOOLS
    + """{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}\
{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}
{%- if m.role == 'assistant' %}<|im_start|>assistant
{%- set content = m.content %}{% set thoughts = m.reasoning_content or '' %}
{%- if '</think>' in content %}{% set thoughts = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}\
{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}
{%- if loop.index0 > ns.last and (loop.last or thoughts) %}{{ '\\n<think>\\n' + thoughts + '\\n</think>\\n\\n' }}\
{%- else %}{{ '\\n' }}{% endif %}{{ content }}
{%- for c in m.tool_calls or [] %}{{ '\\n' if content or not loop.first else '' }}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ m.content }}
</tool_response>{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}{% else %}<|im_start|>{{ m.role + '\\n' + m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{{ '<think>\\n\\n</think>\\n\\n' if thinking is defined else '' }}{% endif %}"""
)

# A pair of tags in every answer, empty where there are no thoughts; the answer is asked for without it.
GLM = Template(
    """[gMASK]<sop>{% if tools %}<|system|>
{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}{% for m in messages %}
{%- if m.role == 'assistant' %}<|assistant|>{{ '\\n<think>' + (m.reasoning_content or '') + '</think>' }}
{%- if m.content.strip() %}{{ '\\n' + m.content.strip() }}{% endif %}
{%- for c in m.tool_calls or [] %}{{ '\\n<tool_call>' + c.function.name + '\\n' }}\
{% for k, v in c.function.arguments.items() %}{{ '<arg_key>' + k + '</arg_key>\\n<arg_value>' }}\
{{ v if v is string else v | tojson }}{{ '</arg_value>\\n' }}{% endfor %}</tool_call>{% endfor %}
{%- elif m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}\
{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- else %}<|{{ m.role }}|>{{ '\\n' + m.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
)

# The tag of thoughts is opened by the prompt; earlier ones are cut off.
R1 = Template(
    """{% for m in messages %}{% if m.role == 'assistant' %}<|Assistant|>{{ m.content.split('</think>')[-1] }}<|end|>\
{% else %}<|User|>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|Assistant|><think>
{% endif %}"""
)

# Tools stand before the last message, so that each turn moves them.
MOVING = Template(
    "{% for m in messages %}{% if loop.last and tools %}[{{ tools | tojson }}]{% endif %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments | tojson }}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def spoken(*control: str) -> Tokenizer:
    """A tokenizer with these control tokens and those of all the templates."""
    roles = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
    return tokenizer(*TURNS, *roles, "<|User|>", "<|Assistant|>", "<|end|>", *THOUGHTS, *control)
