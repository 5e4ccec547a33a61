"""LangChain's `ChatOpenAI`: chat and responses."""

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool as make_tool
from langchain_openai import ChatOpenAI
from weather import API, JSON_LIMIT, MODEL, QUESTION, TEXT_LIMIT, Weather, get_weather, report

OPTIONS = {"model": MODEL, "base_url": API, "api_key": "any"}
chat = ChatOpenAI(**OPTIONS, max_tokens=TEXT_LIMIT)
chat_json = ChatOpenAI(**OPTIONS, max_tokens=JSON_LIMIT)
responses = ChatOpenAI(**OPTIONS, max_tokens=TEXT_LIMIT, use_responses_api=True)
responses_json = ChatOpenAI(**OPTIONS, max_tokens=JSON_LIMIT, use_responses_api=True)
weather = make_tool(get_weather, args_schema=Weather)


def streamed(model, messages):
    total = None
    for chunk in model.stream(messages):
        total = chunk if total is None else total + chunk
    return total


def invoked(model, messages):
    return model.invoke(messages)


def tool(model, ask):
    model = model.bind_tools([weather])
    message = ask(model, [HumanMessage(QUESTION)])
    (call,) = message.tool_calls
    result = ToolMessage("sun", tool_call_id=call["id"])
    return [call["args"], ask(model, [HumanMessage(QUESTION), message, result]).text]


def required(model):
    return model.bind_tools([weather], tool_choice="required", strict=True).invoke(QUESTION).tool_calls[0]["args"]


def structured(model, **options):
    return model.with_structured_output(Weather, **options).invoke(QUESTION).model_dump()


def cases(model, json_model):
    return {
        "text": lambda: model.invoke(QUESTION).text,
        "stream": lambda: streamed(model, QUESTION).text,
        "tool": lambda: tool(model, invoked),
        "streamed_tool": lambda: tool(model, streamed),
        "required": lambda: required(json_model),
        "structured": lambda: structured(json_model),
    }


report(
    chat=cases(chat, chat_json),
    responses=cases(responses, responses_json),
    functions={"structured": lambda: structured(chat_json, method="function_calling")},
)
