-- Ready indexes: which rows, or whole groups, one task may claim by one set of fields, first ready first.

local function since(row, fields)
  local last = row[ELIGIBLE]
  if last == 0 then return nil end
  local prod = row[PROD]
  for j = 1, #fields do
    local seq = prod[fields[j]]
    if not seq then return nil end
    if seq > last then last = seq end
  end
  return last
end

local function load_group(blob)
  if not blob then return { 0, 0, '', '' } end
  return unpack_(blob)
end

local function load_groups(P, names, into)
  local ask = {}
  for _, name in ipairs(names) do
    if not into[name] then ask[#ask + 1] = name; into[name] = true end
  end
  local blobs = hmget(P.K .. 'g', ask)
  for j, name in ipairs(ask) do into[name] = load_group(blobs[j]) end
end

local function save_groups(P, groups)
  local set, del = {}, {}
  for name, g in pairs(groups) do
    if g[2] > 0 then set[#set + 1] = name; set[#set + 1] = pack(g) else del[#del + 1] = name end
  end
  many('HSET', P.K .. 'g', set)
  many('HDEL', P.K .. 'g', del)
end

-- In an index a group is named by its oldest row first: of those that became ready at once, the oldest comes first.
local function rename(P, g, name, oldest)
  if g[4] ~= '' and g[4] ~= oldest then P.stale[#P.stale + 1] = g[4] .. name end
  g[4] = oldest
end

-- Notes whether a row of a group is failed: no claim gives it, and the group has to be whole without it.
local function note_failed(P, g, rid, failed)
  local old = g[5] or ''
  if not P.gsize or (old == '' and not failed) then return end
  local kept = {}
  for _, other in ipairs(split(old)) do if other ~= rid then kept[#kept + 1] = other end end
  if failed then kept[#kept + 1] = rid end
  g[5] = table.concat(kept)
end

-- The rows of a group that a claim may give.
local function fit(g)
  if (g[5] or '') == '' then return split(g[3]) end
  local out, bad = {}, {}
  for _, rid in ipairs(split(g[5])) do bad[rid] = true end
  for _, rid in ipairs(split(g[3])) do if not bad[rid] then out[#out + 1] = rid end end
  return out
end

local function fit_count(g) return g[2] - #(g[5] or '') / WIDTH end

local function join(P, g, name, rid)
  g[2] = g[2] + 1
  if not P.gsize then return end
  g[3] = g[3] .. rid
  if g[4] == '' or rid < g[4] then rename(P, g, name, rid) end
end

local function leave(P, g, name, rid)
  g[2] = g[2] - 1
  if P.gsize then
    local kept, oldest = {}, nil
    for _, other in ipairs(split(g[3])) do
      if other ~= rid then
        kept[#kept + 1] = other
        if not oldest or other < oldest then oldest = other end
      end
    end
    g[3] = table.concat(kept)
    rename(P, g, name, oldest or '')
    note_failed(P, g, rid, false)
  end
  if g[2] == 0 then g[1] = 0 end
end

-- Loads the rows of the groups that are whole by number.
local function whole(P, groups, rows)
  local members, ask, out = {}, {}, {}
  for name, g in pairs(groups) do
    if g[2] > 0 and fit_count(g) >= (g[1] > 0 and g[1] or P.gsize) then
      local rids = fit(g)
      members[name] = rids
      for _, rid in ipairs(rids) do
        out[#out + 1] = rid
        if not rows[rid] then ask[#ask + 1] = rid end
      end
    end
  end
  local blobs = hmget(P.K .. 'r', ask)
  for j, rid in ipairs(ask) do rows[rid] = unpack_(blobs[j]) end
  return members, out
end

-- Rows of groups that were ready and are not any more wait again, unless they are claimed.
local function wait_again(P, ix, rids)
  local claims, add = hmget(P.K .. 'k:' .. ix[2], rids), {}
  for j, blob in ipairs(hmget(P.K .. 'r', rids)) do
    if blob and not claims[j] then add[#add + 1] = unpack_(blob)[CREATED]; add[#add + 1] = rids[j] end
  end
  many('ZADD', P.K .. 'w:' .. ix[1], add)
end

-- Which of these groups an index has as ready, by the names that they had in it.
local function were_ready(P, ix, groups)
  local keys, names, were = {}, {}, {}
  for _, member in ipairs(P.stale) do keys[#keys + 1] = member; names[#names + 1] = string.sub(member, WIDTH + 1) end
  for name, g in pairs(groups) do
    if g[4] ~= '' then keys[#keys + 1] = g[4] .. name; names[#names + 1] = name end
  end
  for i = 1, #keys, CHUNK do
    local scores = redis.call('ZMSCORE', P.K .. 'q:' .. ix[1], unpack(keys, i, math.min(i + CHUNK - 1, #keys)))
    for j = 1, #scores do if scores[j] then were[names[i + j - 1]] = true end end
  end
  return were
end

-- Returns which of these groups are ready, by name.
local function touch_groups(P, ix, groups, members, all, rows)
  local taken, ready, were = {}, {}, were_ready(P, ix, groups)
  local claims = hmget(P.K .. 'k:' .. ix[2], all)
  for j, rid in ipairs(all) do taken[rid] = claims[j] end
  local add, rem, waits, waited = {}, {}, {}, {}
  for j, member in ipairs(P.stale) do rem[j] = member end -- not unpack(): a call may rename more groups than fit a stack
  for name, g in pairs(groups) do
    local last = members[name] and 0
    for _, rid in ipairs(members[name] or {}) do
      local seq = not taken[rid] and since(rows[rid], ix[3])
      if not seq then last = nil break end
      if seq > last then last = seq end
    end
    if last then
      ready[name] = true
      add[#add + 1] = last; add[#add + 1] = g[4] .. name
      if not were[name] then for _, rid in ipairs(members[name]) do waited[#waited + 1] = rid end end
    else
      if g[4] ~= '' then rem[#rem + 1] = g[4] .. name end
      if were[name] then for _, rid in ipairs(split(g[3])) do waits[#waits + 1] = rid end end
    end
  end
  many('ZREM', P.K .. 'q:' .. ix[1], rem)
  many('ZADD', P.K .. 'q:' .. ix[1], add)
  many('ZREM', P.K .. 'w:' .. ix[1], waited)
  wait_again(P, ix, waits)
  return ready
end

-- Tells all indexes (or those of `only`) that rows, and the groups they are or were in, have changed.
-- rids[j] -> list[j]; new[j] where the row did not exist before.
local function touch(P, rids, list, new, groups, only)
  if #P.ix == 0 then return end
  local old = {}
  for j, rid in ipairs(rids) do if not new[j] then old[#old + 1] = rid end end
  local rows, members, all = {}, nil, nil
  if P.gsize then
    for j, rid in ipairs(rids) do rows[rid] = list[j] end
    members, all = whole(P, groups, rows)
  end
  for _, ix in ipairs(only or P.ix) do
    local q, w, fields, taken = P.K .. 'q:' .. ix[1], P.K .. 'w:' .. ix[1], ix[3], {}
    local claims = hmget(P.K .. 'k:' .. ix[2], old)
    for j, rid in ipairs(old) do taken[rid] = claims[j] end
    local ready = P.gsize and touch_groups(P, ix, groups, members, all, rows)
    local q_add, q_rem, w_add, w_rem = {}, {}, {}, {}
    for j, rid in ipairs(rids) do
      local row, free, seq = list[j], not taken[rid], nil
      if ready then
        seq = row[FAILED] ~= 1 and ready[row[GROUP]] or nil
      else
        seq = since(row, fields)
        if free and seq then
          q_add[#q_add + 1] = seq; q_add[#q_add + 1] = rid
        elseif not new[j] then
          q_rem[#q_rem + 1] = rid
        end
      end
      if free and not seq then
        w_add[#w_add + 1] = row[CREATED]; w_add[#w_add + 1] = rid
      elseif not new[j] then
        w_rem[#w_rem + 1] = rid
      end
    end
    many('ZADD', q, q_add)
    many('ZREM', q, q_rem)
    many('ZADD', w, w_add)
    many('ZREM', w, w_rem)
  end
end

-- Takes rows out of all indexes: they are gone. Their groups are told.
local function untouch(P, rids, groups)
  for _, ix in ipairs(P.ix) do
    many('ZREM', P.K .. 'w:' .. ix[1], rids)
    if not P.gsize then many('ZREM', P.K .. 'q:' .. ix[1], rids) end
  end
  if P.gsize then touch(P, {}, {}, {}, groups) end
end

local function drop_index(P, ix)
  redis.call('UNLINK', P.K .. 'q:' .. ix[1], P.K .. 'w:' .. ix[1], P.K .. 'b:' .. ix[1])
end

-- Shows a page of the rows that were there before an index to it; the server is busy with one for 30 ms at most.
local PAGE = 2048
local function fill(P, ix)
  local todo = P.K .. 'b:' .. ix[1]
  local popped, page = redis.call('ZPOPMIN', todo, PAGE), {}
  for j = 1, #popped, 2 do page[#page + 1] = popped[j] end
  local rids, list, groups, names = {}, {}, {}, {}
  for j, blob in ipairs(hmget(P.K .. 'r', page)) do
    if blob then
      rids[#rids + 1] = page[j]
      list[#list + 1] = unpack_(blob)
      names[#names + 1] = list[#list][GROUP]
    end
  end
  if P.gsize then load_groups(P, names, groups) end
  touch(P, rids, list, {}, groups, { ix })
  if #page == PAGE then return end
  ix[4] = nil
  save(P)
end

-- The index of a task and a set of fields (numbers, ascending), built on first use; [4] while it is being built.
local MOST_INDEXES = 32
local function index(P, task, fields)
  local name = table.concat(fields, ',')
  for _, ix in ipairs(P.ix) do
    if ix[2] == task and table.concat(ix[3], ',') == name then
      if ix[4] then fill(P, ix) end
      return ix
    end
  end
  if #P.ix >= MOST_INDEXES then drop_index(P, table.remove(P.ix, 1)) end
  P.ixn = P.ixn + 1
  local ix = { P.ixn, task, fields, true }
  P.ix[#P.ix + 1] = ix
  save(P)
  local todo = {} -- in order of age: then the rows of a group come in one page, mostly
  for j, rid in ipairs(redis.call('HKEYS', P.K .. 'r')) do todo[2 * j - 1] = 0; todo[2 * j] = rid end
  many('ZADD', P.K .. 'b:' .. ix[1], todo)
  fill(P, ix)
  return ix
end

local function all_rows(P)
  local flat = redis.call('HGETALL', P.K .. 'r')
  local rids, rows = {}, {}
  for j = 1, #flat, 2 do rids[#rids + 1] = flat[j]; rows[flat[j]] = unpack_(flat[j + 1]) end
  table.sort(rids)
  local list = {}
  for j, rid in ipairs(rids) do list[j] = rows[rid] end
  return rids, list
end

-- Whole groups were declared for rows that are there already.
local function regroup(P)
  for _, ix in ipairs(P.ix) do drop_index(P, ix) end
  P.ix = {}
  local rids, list = all_rows(P)
  local groups, names = {}, {}
  for _, row in ipairs(list) do names[#names + 1] = row[GROUP] end
  load_groups(P, names, groups)
  local parts = {}
  for j, row in ipairs(list) do
    local name = row[GROUP]
    parts[name] = parts[name] or {}
    table.insert(parts[name], rids[j])
    note_failed(P, groups[name], rids[j], row[FAILED] == 1)
  end
  for name, members in pairs(parts) do groups[name][3], groups[name][4] = table.concat(members), members[1] end
  save_groups(P, groups)
end
